"""Data sets of the recipes, and orders, draws and changes that depend on seed, epoch and row alone."""
