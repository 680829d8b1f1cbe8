"""Runs a pipe in several processes: rendezvous, messages, gradient reductions and failure detection."""
