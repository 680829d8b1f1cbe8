"""Moved to `gpipe.profiling.svg`."""
