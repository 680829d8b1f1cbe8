"""Runs a pipe over several processes: rendezvous, messages, reductions and failure detection."""
