"""Splits mini-batches into micro-batches, checks the inputs of a call, and weights losses."""
