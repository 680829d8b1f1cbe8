"""What each layer costs: measured or counted."""
