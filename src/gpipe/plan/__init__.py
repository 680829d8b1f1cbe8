"""Floor 1: what a pipeline will do, as data and pure functions. Nothing here imports torch."""
