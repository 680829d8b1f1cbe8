"""From arguments to settings: what is refused, what is chosen, what the user is told.

What the user is told of a pipe: before training of its settings, then of what its steps show, and in summary.
"""
