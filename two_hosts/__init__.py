"""Simulates two hosts on one machine, for tests and benchmarks: see `hosts`."""
