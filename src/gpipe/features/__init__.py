"""What a mini-batch may do besides forwards and backwards: each feature is one file, with its state."""
