"""Represents pipeline schedules as data, completes them to executable programs, and simulates them."""
