"""Runs the user's layers as stages: stage boundaries, skip connections, shared weights, buffers, random numbers.

Tensors that cross a stage boundary keep their memory layout and the order in which their gradients are summed. Random
numbers depend only on seed, step, layer and micro-batch.
"""
