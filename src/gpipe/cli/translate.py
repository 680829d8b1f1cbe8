"""The command `gpipe translate`: lines on stdin to English."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gpipe.cli.ending import ending_by_mistakes

if TYPE_CHECKING:
    from gpipe.recipes.translation.lines import Translator

AT_ONCE = 64
"""Lines that are read before they are translated, unless somebody types them."""


@dataclass(frozen=True)
class TranslateOptions:
    """By which run lines are translated."""

    run: Path
    """The folder of a run of `gpipe train translation`."""

    beam: int = 4
    """How many translations are followed at once; 1: the likeliest word is taken each time."""

    partitions: int | None = None
    """K: how many partitions the network is cut into; by default 2. Translations do not depend on it."""


def translate(options: Annotated[TranslateOptions, tyro.conf.arg(name="")]) -> None:
    """Translates each line of stdin to English, a line of stdout each."""
    with ExitStack() as stack:
        with ending_by_mistakes():
            if options.beam < 1:
                raise ValueError(f"--beam is {options.beam}: choose 1 or more")
            from gpipe.recipes.files import WEIGHTS
            from gpipe.recipes.translation.lines import opened_translator

            to_english = stack.enter_context(opened_translator(options.run, options.partitions, options.beam))
        if not (options.run / WEIGHTS).is_file():
            print(f"{options.run} has not ended: by the weights of its latest checkpoint", file=sys.stderr)
        _translate(to_english)


def _translate(to_english: "Translator") -> None:
    """Prints a line for each of stdin; one that cannot be translated ends the command."""
    number = 1
    with ending_by_mistakes():
        try:
            for lines in _chunks(1 if sys.stdin.isatty() else AT_ONCE):
                for english in to_english(lines):
                    print(english, flush=True)
                    number += 1
        except ValueError as mistake:
            raise ValueError(f"line {number} of stdin: {mistake}") from None


def _chunks(size: int) -> Iterator[list[str]]:
    """The lines of stdin, so many at once; before one that is no UTF-8 all are given.

    Raises:
        ValueError: A line is no UTF-8.
    """
    lines: list[str] = []
    for line in getattr(sys.stdin, "buffer", sys.stdin):
        try:
            lines.append((line.decode() if isinstance(line, bytes) else line).rstrip("\r\n"))
        except UnicodeDecodeError as error:
            yield lines
            raise ValueError(f"it is no UTF-8, from byte {error.start + 1} on") from None
        if len(lines) == size:
            yield lines
            lines = []
    yield lines
