"""A model as layers: where it is cut, the paths that it takes, its own loss, and its values."""
