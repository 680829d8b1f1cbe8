"""One mini-batch: the loop over actions, its workers, threads and streams."""
