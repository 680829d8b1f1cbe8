"""Loops that others have written, over a pipe: Trainers of transformers and of Lightning."""
