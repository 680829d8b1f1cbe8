"""The user's layers: built, cut into stages, and what a pipeline must know of them.

What flows between layers: trees of tensors, how they lie in memory, cut at stage boundaries.

Randomness keyed by seed, step, layer and micro-batch.
"""
