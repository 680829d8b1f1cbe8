"""The command `gpipe translate`: lines on stdin to English."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import tyro

from gpipe.cli.ending import ending_by_mistakes

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
            from gpipe.recipes.translation.lines import opened_translator

            to_english = stack.enter_context(opened_translator(options.run, options.partitions, options.beam))
        for lines in _chunks(1 if sys.stdin.isatty() else AT_ONCE):
            print(*to_english(lines), sep="\n", flush=True)


def _chunks(size: int) -> Iterator[list[str]]:
    """The lines of stdin, so many at once."""
    while lines := list(islice(sys.stdin, size)):
        yield [line.rstrip("\n") for line in lines]
