"""What flows between layers: trees of tensors, how they lie in memory, cut at stage boundaries."""
