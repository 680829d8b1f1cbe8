"""Randomness keyed by seed, step, layer and micro-batch."""
