"""Splits any model into stages: traces its forward, splits the trace at blocks, and interprets the parts.

The tracer runs the model once and records its operations in order: the trace. Each stage then runs the forward from
the top, but executes only the operations of its own layers.
"""
