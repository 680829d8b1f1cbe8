"""What recorded steps show: where their time went, and what would make them faster."""
