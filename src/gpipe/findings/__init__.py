"""What the user is told of a pipe: before training of its settings, then of what its steps show, and in summary."""
