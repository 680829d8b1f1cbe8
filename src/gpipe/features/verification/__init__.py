"""Verifies steps against the reference loop: records a step, replays it, and compares the results."""
