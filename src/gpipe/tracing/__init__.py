"""Any model as stages: its forward is traced, cut, and interpreted part by part.

The tracer runs it once, whole, and writes a trace: its operations, in order. Cut at its blocks, each stage interprets
the forward from the top and does the operations of its own layers alone.
"""
