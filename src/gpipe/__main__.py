"""Lets `python -m gpipe` be the command `gpipe`."""

from gpipe.cli.main import main

main()
