"""Runs a model once, whole, writes down the path of its forward, and proves it."""
