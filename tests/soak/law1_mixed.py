"""Same bits over generated models that mix everything a layer may do.

Each model is run in each of K = 1, 2, 3, 4 (as far as it has layers), each time under a random cut, remat and driver,
and compared to the last bit with K = 1 in lockstep without rematerialization, and with the plain loop: losses,
gradients of parameters and inputs, parameters after optimizer steps, buffers, and a final evaluation. Only what
deferred BatchNorm gathers is not compared with the plain loop, nor what evaluation makes of it.

    python -m tests.soak.law1_mixed [models] [first seed]
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from random import Random

from rich.progress import track

from tests.support.mixed_tasks import Task, Way, check

from .law1 import keep


def contents_of(task: Task) -> Iterator[str]:
    """What a model is counted under."""
    for kind in task.model.kinds:
        yield f"with {kind.removeprefix('again: ')}"
        if kind.startswith("again: "):
            yield "with a layer used twice"


def kinds_of(task: Task, way: Way) -> Iterator[str]:
    """What a configuration is counted under."""
    yield "configurations"
    yield f"K = {len(way.cut)}"
    yield f"driver {way.driver}"
    yield f"by {task.way}"
    yield f"M = {task.micro_batches}"
    if any(rows % min(task.micro_batches, rows) for rows in task.rows):
        yield "uneven micro-batches"
    yield f"deferred_batch_norm={task.deferred}"
    yield from (f"remat {remat}" for remat in way.remat)


def main(models: int = 400, first: int = 0) -> None:
    """Checks so many models, and keeps what came of it."""
    logging.getLogger("gpipe").setLevel(logging.ERROR)  # the models are not meant to be healthy
    began = time.monotonic()
    count: Counter[str] = Counter()
    bad = []
    for seed in track(range(first, first + models), description="models"):
        task, found = check(Random(seed))
        count.update(set(contents_of(task)))
        for way, wrong in found.items():
            count.update(set(kinds_of(task, way)))
            if wrong:
                bad.append({"seed": seed, "way": repr(way), "task": task.way, "differs": wrong[:8]})
                print(seed, way, task.model.kinds, wrong[:4])
    keep(
        "law1_mixed",
        "Same bits over models that mix everything",
        f"{count['configurations']} configurations of {models} models (seeds {first} to {first + models - 1})",
        "Each was compared, to the last bit, with K = 1 in lockstep without rematerialization and with the plain "
        "loop: losses, gradients of parameters and inputs, parameters after SGD with momentum and weight decay, "
        "buffers, two mini-batches and an evaluation.",
        began,
        count,
        bad,
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
