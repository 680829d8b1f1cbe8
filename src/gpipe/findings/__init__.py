"""What is said of a pipe, before it runs and by what its first mini-batches show."""
