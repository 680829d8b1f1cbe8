"""The user's layers as stages: boundaries, skips, shared weights, buffers, random numbers.

What flows between layers: trees of tensors, how they lie in memory, cut at stage boundaries.

Randomness keyed by seed, step, layer and micro-batch.
"""
