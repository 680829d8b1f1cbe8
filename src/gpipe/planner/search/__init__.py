"""Finds the fastest plan with which a model fits on devices, from the costs of its layers. Works without torch."""
