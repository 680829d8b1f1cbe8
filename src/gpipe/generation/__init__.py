"""Runs `generate` of a model through a pipe. Each rank keeps the KV cache of its own layers."""
