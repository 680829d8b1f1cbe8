"""Finds the fastest plan that fits on devices, from the costs of the layers of a model. Works without torch."""
