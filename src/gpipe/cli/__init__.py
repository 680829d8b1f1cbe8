"""The command `gpipe`: one module a subcommand."""
