"""From the user's arguments to a pipe: what they mean, whether they can be, and the stages that they make.

What the user is told of a pipe: before training of its settings, then of what its steps show, and in summary.
"""
