"""Resolves the arguments of `GPipe` to settings and a plan, and reports errors and findings."""
