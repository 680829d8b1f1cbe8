"""Lets `python -m gpipe` be the command `gpipe`."""

from gpipe.cli import main

main()
