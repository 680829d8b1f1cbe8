"""The command `gpipe evaluate`: how well a run does, or several and their mean."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gpipe.cli.ending import ending_by_failures_elsewhere, ending_by_mistakes


@dataclass(frozen=True)
class EvaluateOptions:
    """What is evaluated."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """The folders of runs of `gpipe train`; of several the mean and the spread are told too."""

    partitions: int | None = None
    """K: how many partitions the network is cut into; by default 2, or under torchrun as many as there are processes.
    Numbers do not depend on it."""

    beam: int | None = None
    """Of a translation, how many translations of a sentence are followed at once, beside the greedy one; 1: none."""

    sentences: int | None = None
    """Of a translation, how many sentences of each language are translated at most; by default all of the test."""


def evaluate(options: Annotated[EvaluateOptions, tyro.conf.arg(name="")]) -> None:
    """Evaluates a run on data that its training has not seen: a table, and RUN/evaluation.json."""
    with ending_by_mistakes():
        if not options.runs:
            raise ValueError("give the folder of a run, such as out/digits; `gpipe train` writes it")
        for name in ("beam", "sentences"):
            if (value := getattr(options, name)) is not None and value < 1:
                raise ValueError(f"--{name} is {value}: choose 1 or more")
        changes = {"beam": options.beam, "sentences": options.sentences}
        from gpipe.recipes.evaluating import evaluate_run, spread
        from gpipe.recipes.options.files import recipe_of
        from gpipe.recipes.world import find_world, joined

    world = find_world(os.environ)
    with joined(world), ending_by_failures_elsewhere():
        with ending_by_mistakes():
            for run in options.runs:
                recipe_of(run)
        found = []
        for run in options.runs:
            with ending_by_mistakes():
                found.append(evaluate_run(run, options.partitions, changes, world))
            if not world.rank:
                print(f"{run}: {found[-1].text}\n" if len(options.runs) > 1 else found[-1].text)
        if len(found) > 1 and not world.rank:
            print(spread(found))
