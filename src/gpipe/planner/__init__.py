"""Measures or counts the costs of layers. `gpipe.planner.search` finds the fastest plan from them."""
