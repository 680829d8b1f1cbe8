"""Generation through a pipe: each rank keeps the cache of its own layers."""
