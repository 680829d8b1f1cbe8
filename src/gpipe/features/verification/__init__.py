"""Verifies steps against the reference loop: records, replays and compares."""
