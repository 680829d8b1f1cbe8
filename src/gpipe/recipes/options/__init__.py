"""What `gpipe train` can be told: dataclasses, whose names are those of config.toml and, as flags, of the command."""
