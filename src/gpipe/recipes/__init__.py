"""Trains and evaluates the example models of `gpipe train`, using only public APIs of gpipe."""
