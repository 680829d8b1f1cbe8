"""Options of `gpipe train`: dataclasses, whose names are those of config.toml and, as flags, of the command."""
