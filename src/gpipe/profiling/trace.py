"""Moved to `gpipe.profiling.stored`."""
