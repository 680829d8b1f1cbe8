"""Features of a mini-batch in addition to forward and backward passes. Each file has one feature and its state."""
