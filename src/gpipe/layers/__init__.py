"""The user's layers: built, cut into stages, and what a pipeline must know of them."""
