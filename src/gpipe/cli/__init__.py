"""The command `gpipe`: one module for each of its commands."""
