"""Runs the Trainers of transformers, trl and Lightning on a pipe."""
