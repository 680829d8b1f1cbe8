"""Records the path that a model takes on a sample, cuts it into layers, and proves them."""
