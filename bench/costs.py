"""What it takes to find out what layers cost: AmoebaNet-D (18, 64) at 64x64, by each way that there is.

    python -m bench.costs

The ways take turns, a fresh pipe each time, over the same layers. A minute.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

import gpipe
from bench.machine import busy_seconds, facts
from bench.report import describe, spread, table, with_time_left, write
from gpipe.models import amoebanet_d

LAYERS, FILTERS, SIZE, CLASSES = 18, 64, 64, 10
PARTITIONS, MICRO_BATCHES, ROWS = 4, 8, 32
WANTED = 10.0
"""Seconds in which the time of all layers must be measured."""
WAYS = {
    "params": "parameters, counted",
    "flops": "operations, counted on the meta device",
    "time": "time, measured on the first micro-batch of a sample",
    "again": "the measured times, saved and given again",
}


@dataclass
class Row:
    """What one way took, by round; `cuts` are the layers of each partition, in the last round.

    Attributes:
        seconds: From the call of `GPipe` until the pipe was there.
        own: CPU seconds of this process meanwhile.
        others: CPU seconds of all other processes of the machine meanwhile.
    """

    seconds: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    cuts: Sequence[int] = ()


def measure(rounds: int) -> dict[str, Row]:
    """Builds a pipe by each way in turn."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers, sample = amoebanet_d(LAYERS, FILTERS, CLASSES), torch.randn(ROWS, 3, SIZE, SIZE)
    found, saved = {way: Row() for way in WAYS}, ""
    for way in with_time_left([*WAYS] * rounds, "costs"):
        costs: Any = json.loads(saved) if way == "again" else way
        start, own, every = time.perf_counter(), time.process_time(), busy_seconds()
        pipe = gpipe.GPipe(layers, PARTITIONS, MICRO_BATCHES, costs=costs, sample=sample)
        seconds, used = time.perf_counter() - start, time.process_time() - own
        row = found[way]
        row.seconds.append(seconds)
        row.own.append(used)
        row.others.append(max(0.0, busy_seconds() - every - used))
        row.cuts = pipe.layers_per_partition
        saved = json.dumps(pipe.costs) if way == "time" else saved
        pipe.close()
    assert found["again"].cuts == found["time"].cuts
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.costs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found, about = measure(options.rounds), facts()
    rows = [
        [
            WAYS[way],
            spread(row.seconds, 1, 3),
            spread(row.own, 1, 3),
            f"{median(row.others):.2g}",
            "+".join(map(str, row.cuts)),
        ]
        for way, row in found.items()
    ]
    header = ["", "seconds", "CPU seconds", "of other processes", "cuts"]
    text = (
        f"# Costs of layers\n\n{describe(about)}\n\nAmoebaNet-D ({LAYERS}, {FILTERS}) at {SIZE}x{SIZE}: "
        f"{LAYERS + 6} layers, K={PARTITIONS}, M={MICRO_BATCHES}, a sample of {ROWS} images, one micro-batch of "
        f"which is run; one thread. Construction of a pipe, {options.rounds} times: median (least-greatest). "
        f"Wanted: under {WANTED:g} s, by time.\n\n{table(header, rows)}"
    )
    write("costs", text, {"facts": about, "found": {way: asdict(row) for way, row in found.items()}})


if __name__ == "__main__":
    main()
