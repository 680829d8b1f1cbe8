"""Any model as stages: its forward is traced, cut, and interpreted part by part.

Runs a model once, whole, writes down the trace of its forward, and proves it.

A model as layers: where it is cut, the traces that it takes, its own loss, and its values.
"""
