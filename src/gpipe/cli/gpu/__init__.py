"""Runs the checks of `gpipe doctor --gpu`, which need a machine with accelerators."""
