"""One mini-batch in one process: the executor of programs."""
