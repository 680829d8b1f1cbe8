"""Joined with a module beside it."""
