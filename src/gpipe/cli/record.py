"""The command `gpipe record`: what crosses between processes, for those who tune that."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gpipe.cli.ending import ending_by_failures_elsewhere, ending_by_mistakes


@dataclass(frozen=True)
class RecordOptions:
    """What is recorded."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run of `gpipe train`."""

    steps: int = 10
    """How many mini-batches are trained on meanwhile; the run stays as it is."""

    partitions: int | None = None
    """K: how many partitions the network is cut into; by default as many as there are processes."""


def record(options: Annotated[RecordOptions, tyro.conf.arg(name="")]) -> None:
    """Writes each message between the processes of torchrun as a line of JSON, to RUN/messages.jsonl."""
    with ending_by_mistakes():
        for name in ("steps", "partitions"):
            if (value := getattr(options, name)) is not None and value < 1:
                raise ValueError(f"--{name} is {value}: choose 1 or more")
        from gpipe.recipes.world import find_world, joined

        world = find_world(os.environ)
        if not world.launched:
            raise ValueError(
                "within one process nothing crosses: run it by torchrun, say\n"
                f"torchrun --nproc-per-node 2 -m gpipe record {options.run}"
            )
        from gpipe.recipes.crossing import record_run
    with joined(world), ending_by_failures_elsewhere(), ending_by_mistakes():
        said = record_run(options.run, options.steps, options.partitions, world)
    if not world.rank:
        print(said)
