"""From arguments to settings: what is refused, what is chosen, what the user is told."""
