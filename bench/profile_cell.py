"""What the runtime costs for each (stage, micro-batch) where layers cost next to nothing, and what of it is for what.

The tiny workload: 8 x Linear(32) + Tanh, K=2, M=64, one row a micro-batch. All ways take turns in one process. The
ablations each take one service of the library away, or add one, and are shown beside it as it is.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import gpipe
from bench.floor import Floor
from bench.machine import facts
from bench.report import describe, table, write
from bench.workloads import WORKLOADS, Workload

PARTITIONS, MICRO_BATCHES = 2, 64
CELLS = PARTITIONS * MICRO_BATCHES
STEPS = 5
Act = Callable[[], object]


@dataclass
class Way:
    """One way to run the mini-batch, and the seconds that its steps took."""

    name: str
    act: Act
    parameters: Sequence[nn.Parameter]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    seconds: list[float] = field(default_factory=list)

    def turn(self) -> None:
        """Runs some steps."""
        with self.around():
            for at in range(STEPS + 1):
                for parameter in self.parameters:
                    parameter.grad = None
                start = time.perf_counter()
                self.act()
                if at:  # the first one warms up
                    self.seconds.append(time.perf_counter() - start)

    def cells(self, base: "Way") -> list[str]:
        """The row as it is shown: times for a cell, and relative to another way."""
        least, low, middle = (f"{1e6 * value / CELLS:.1f}" for value in self.figures())
        ratios = [f"{mine / its:.2f}" for mine, its in zip(self.figures(), base.figures(), strict=True)]
        return [self.name, middle, low, least, ratios[2], ratios[1], ratios[0]]

    def figures(self) -> tuple[float, float, float]:
        """Seconds: the least, the lower quarter, the median."""
        ordered = sorted(self.seconds)
        return ordered[0], ordered[len(ordered) // 4], median(ordered)


HEADER = ["way", "us/cell: median", "lower quarter", "least", "relative: median", "lower quarter", "least"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.profile_cell", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40, help="for each of the three tables")
    parser.add_argument("--profile", action="store_true", help="print where lockstep spends its time, and end")
    parser.add_argument("--keep", default="profile_cell")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        profile()
        return
    about = facts()
    parts = [f"# What a cell costs: tiny layers, K={PARTITIONS}, M={MICRO_BATCHES}", describe(about)]
    tables: dict[str, list[Way]] = {
        "Ways": take_turns(list(ways()), options.seconds),
        "Ablations of `step` without remat": take_turns(list(ablations()), options.seconds),
        "Layers that draw: Linear + Tanh + Dropout(0.1)": take_turns(list(drawing()), options.seconds),
    }
    for title, found in tables.items():
        parts += [f"## {title}", table(HEADER, [way.cells(found[0]) for way in found])]
    kept = {
        title: {way.name: dict(zip(("least", "quarter", "median"), way.figures(), strict=True)) for way in found}
        for title, found in tables.items()
    }
    write(options.keep, "\n\n".join(parts), {"facts": about, "cells": CELLS, "seconds": kept})


def take_turns(found: list[Way], seconds: float) -> list[Way]:
    """Gives everyone turns until the time is up, at least five."""
    until = time.monotonic() + seconds
    turns = 0
    while turns < 5 or time.monotonic() < until:
        for way in found:
            way.turn()
        turns += 1
    return found


def ways() -> Iterator[Way]:
    """The plain loop first; then everything without remat and with it."""
    work = WORKLOADS["tiny"]
    yield plain(work)
    yield floor(work, remat=False)
    yield pipe(work, "gpipe `step`")
    yield pipe(work, "gpipe `loss.backward()`", call=True)
    yield pipe(work, "gpipe `step`, lockstep", driver="lockstep")
    yield pipe(work, "gpipe `step`, K=1", partitions=[8])
    yield floor(work, remat=True)
    yield pipe(work, "gpipe `step`, remat", remat="always")
    yield pipe(work, "gpipe `loss.backward()`, remat", call=True, remat="always")
    yield pipe(work, "gpipe `step`, except_last", remat="except_last")
    yield pipe(work, "gpipe `step`, lockstep, remat", driver="lockstep", remat="always")


class _Bare:
    """Stands in for what keeps the strides of gradients, and does not."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves

    def gradients(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in self.leaves]


class _Nowhere:
    """Stands in for a visit, and for the context of a backward."""

    def __init__(self, *key: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


WITHOUT: dict[str, tuple[str, object]] = {
    "error notes: which layer": ("gpipe.layers.stage._sequence_number", int),
    "strides of gradients": ("gpipe.runtime.worker.KeptGradients", _Bare),
    "keys of layers": ("gpipe.layers.stage.PipeVisit", _Nowhere),
    "keys of the loss": ("gpipe.runtime.worker.PipeVisit", _Nowhere),
    "watch on backwards": ("gpipe.runtime.worker.InBackward", _Nowhere),
}
"""What can be taken away: where the library has it, and what stands in for it."""


def ablations() -> Iterator[Way]:
    """`step` as it is; with the recorder; without this and that; without all."""
    work = WORKLOADS["tiny"]
    base = pipe(work, "as it is")
    yield base
    yield Way("with the recorder", base.act, base.parameters, lambda: gpipe.record(_pipe_of(base)))
    there = {name: what for name, what in WITHOUT.items() if _exists(what[0])}
    for name, (place, stand_in) in there.items():
        yield Way(f"without {name}", base.act, base.parameters, lambda p=place, s=stand_in: patch(p, s))  # type: ignore[misc]
    yield Way("without all of these", base.act, base.parameters, lambda: _all_patched(list(there.values())))


def drawing() -> Iterator[Way]:
    """Layers with dropout: torch's own generator in the plain loop, keys in the plain loop, keys in the pipe."""
    tiny = WORKLOADS["tiny"]

    def layers() -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)]

    work = Workload("drawing", "", layers, tiny.batch, tiny.loss_fn, PARTITIONS, MICRO_BATCHES)
    yield plain(work)
    yield plain(work, keyed=True)
    yield pipe(work, "gpipe `step`")
    yield pipe(work, "gpipe `step`, remat", remat="always")


def plain(work: Workload, *, keyed: bool = False) -> Way:
    """The plain loop; with `keyed`, a visit around each layer."""
    layers = work.layers()
    network = nn.Sequential(*layers)
    inputs, targets = (tensor.tensor_split(MICRO_BATCHES) for tensor in work.data())
    seed = torch.full((), 1 / MICRO_BATCHES)

    def forward(value: Tensor, m: int) -> Tensor:
        if not keyed:
            output: Tensor = network(value)
            return output
        for at, layer in enumerate(layers):
            with gpipe.visit(0, 0, at, m):
                value = layer(value)
        return value

    def act() -> None:
        for m in range(MICRO_BATCHES):
            work.loss_fn(forward(inputs[m], m), targets[m]).backward(seed)

    return Way("plain loop, keyed" if keyed else "plain loop", act, list(network.parameters()))


def floor(work: Workload, *, remat: bool) -> Way:
    """Bare threads."""
    layers = work.layers()
    inputs, targets = (tensor.tensor_split(MICRO_BATCHES) for tensor in work.data())
    threads = Floor([nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:])], work.loss_fn, remat=remat)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return Way("bare threads" + ", remat" * remat, lambda: threads.step(inputs, targets), parameters)


def pipe(
    work: Workload, name: str, *, call: bool = False, partitions: Sequence[int] = (4, 4), remat: str = "never",
    driver: str | None = None,
) -> Way:  # fmt: skip
    """This library."""
    made = gpipe.GPipe(work.layers(), partitions, MICRO_BATCHES, remat=remat, driver=driver, seed=0)
    inputs, targets = work.data()

    def step() -> None:
        made.step(inputs, targets, work.loss_fn)

    def forward_and_backward() -> None:
        work.loss_fn(made(inputs), targets).backward()

    way = Way(name, forward_and_backward if call else step, list(made.parameters()))
    _PIPES[id(way)] = made
    return way


_PIPES: dict[int, gpipe.GPipe] = {}


def _pipe_of(way: Way) -> Any:
    return _PIPES[id(way)]


def _exists(place: str) -> bool:
    module, _, attribute = place.rpartition(".")
    return hasattr(__import__(module, fromlist=[attribute]), attribute)


@contextmanager
def _all_patched(places: Sequence[tuple[str, object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for place, stand_in in places:
            stack.enter_context(patch(place, stand_in))
        yield


def profile(steps: int = 50, shown: int = 30) -> None:
    """Prints where lockstep, which is one thread, spends its time."""
    way = pipe(WORKLOADS["tiny"], "lockstep", driver="lockstep")
    way.turn()
    profiler = cProfile.Profile()
    profiler.runcall(lambda: [way.act() for _ in range(steps)])
    pstats.Stats(profiler).sort_stats("tottime").print_stats(shown)


if __name__ == "__main__":
    main()
