"""Floor 2: the runtime, on torch."""
