"""Defines the options of `gpipe train`, with the same names in config.toml, on the command line and in Python."""
