"""Measures or counts the costs of layers. From these costs, `gpipe.planner.search` finds the fastest plan."""
