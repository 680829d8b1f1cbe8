"""Everything in a mini-batch besides forwards and backwards: each feature is one file, with its state."""
