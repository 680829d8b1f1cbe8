"""Finds, on paper, how a network is trained fastest on devices that it fits on."""
