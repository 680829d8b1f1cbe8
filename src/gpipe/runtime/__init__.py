"""One mini-batch: the loop over actions, its ranks, threads and streams."""
