"""Measures the time of a training step with gpipe and with other runtimes on the same machine."""
