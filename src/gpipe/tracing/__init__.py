"""Splits any model into stages: traces the forward, splits the trace at blocks, and interprets it in each stage.

The tracer runs the model once and records its operations in order, as the trace. Each stage then runs the forward
from the top, but executes only the operations of its own layers.
"""
