"""Any model as layers: its own forward is replayed, and each layer computes its part of it.

Runs a model once, whole, writes down the path of its forward, and proves it.

A model as layers: where it is cut, the paths that it takes, its own loss, and its values.
"""
