"""What keyed randomness costs: a Transformer with dropout 0.1, and tiny layers with it, with and without keys.

    python -m bench.keyed

Eight blocks, d=256, sequence 128, 16 rows, M=8. `loop` runs the plain layers micro-batch by micro-batch, `pipe` two
partitions in two threads. Without a key the threads draw from torch's one generator, in any order: the numbers are
then wrong, but it is what keying must be compared with. Variants take turns in one process; medians of the rounds.

The tiny layers, 8 x Linear(32) + Tanh + Dropout(0.1), K=2, M=64, are run by the calling thread alone.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

import gpipe
from bench import profile_cell
from bench.machine import facts
from bench.profile_cell import HEADER, Way, plain, take_turns
from bench.profile_cell import pipe as way_of
from bench.report import describe, table, write
from bench.workloads import WORKLOADS, Workload
from gpipe.models import transformer_lm

ROUNDS = 9
NOTHING = nullcontext()
BLOCKS, WIDTH, LENGTH, ROWS, MICRO_BATCHES, VOCABULARY = 8, 256, 128, 16, 8, 1000


def layers(dropout: float) -> list[nn.Module]:
    torch.manual_seed(0)
    return transformer_lm(BLOCKS, model_dim=WIDTH, ffn_dim=4 * WIDTH, heads=4, vocab=VOCABULARY, dropout=dropout)


tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def loop(dropout: float, *, keyed: bool) -> Callable[[], None]:
    network = layers(dropout)

    def step() -> None:
        for m, part in enumerate(tokens.tensor_split(MICRO_BATCHES)):
            value = part
            for index, layer in enumerate(network):
                with gpipe.visit(0, 0, index, m) if keyed else nullcontext():
                    value = layer(value)
            loss_fn(value, part).backward()
        for layer in network:
            layer.zero_grad()

    return step


def pipe(dropout: float, *, keyed: bool) -> Callable[[], None]:
    piped = gpipe.GPipe(layers(dropout), [5, 5], MICRO_BATCHES, remat="never", seed=0)

    def step() -> None:
        piped.step(tokens, tokens, loss_fn)
        piped.zero_grad()

    def unkeyed_step() -> None:
        with unkeyed(piped):
            step()

    return step if keyed else unkeyed_step


@contextmanager
def unkeyed(piped: gpipe.GPipe) -> Iterator[None]:
    """Has a pipe leave randomness to torch, in forwards and backwards."""
    with ExitStack() as stack:
        for name in ("stage.PipeVisit", "worker.PipeVisit", "worker.InBackward"):
            stack.enter_context(patch(f"gpipe.rng.{name}", nullcontext_of))
        yield


def nullcontext_of(*key: object) -> AbstractContextManager[None]:
    return NOTHING


def measure() -> dict[str, float]:
    """The median seconds of a step, by variant."""
    torch.set_num_threads(1)
    variants = {
        "loop, no dropout": loop(0.0, keyed=False),
        "loop, dropout, torch's generator": loop(0.1, keyed=False),
        "loop, dropout, keyed": loop(0.1, keyed=True),
        "pipe, no dropout": pipe(0.0, keyed=True),
        "pipe, dropout, torch's generator": pipe(0.1, keyed=False),
        "pipe, dropout, keyed": pipe(0.1, keyed=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(1 + ROUNDS):
        for name, step in variants.items():
            start = time.perf_counter()
            step()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def tiny() -> Iterator[Way]:
    """Tiny layers that draw: the plain loop, and the calling thread alone in all ways, with remat too."""
    base = WORKLOADS["tiny"]

    def build() -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)]

    work = Workload("drawing", "", build, base.batch, base.loss_fn, 2, 64)
    yield plain(work)
    yield plain(work, keyed=True)
    for partitions in ([4, 4], [8]):
        arounds: dict[str, Callable[[gpipe.GPipe], AbstractContextManager[object]]] = {
            "torch's generator": unkeyed,
            "keyed": lambda piped: nullcontext(),
            "keyed, with the recorder": gpipe.record,
        }
        for name, around in arounds.items():
            yield _around(
                way_of(work, f"K={len(partitions)}, {name}", partitions=partitions, driver="lockstep"), around
            )
    yield way_of(work, "K=2, remat, keyed", remat="always", driver="lockstep")  # unkeyed, it would fail


def _around(way: Way, around: Callable[[gpipe.GPipe], AbstractContextManager[object]]) -> Way:
    way.around = partial(around, profile_cell._pipe_of(way))
    return way


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.keyed", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40, help="for the tiny layers")
    options = parser.parse_args()
    medians = measure()
    found = take_turns(list(tiny()), options.seconds)
    overhead = {
        who: medians[f"{who}, dropout, keyed"] / medians[f"{who}, dropout, torch's generator"] - 1
        for who in ("loop", "pipe")
    }
    about = facts()
    text = [
        "# What keyed randomness costs",
        describe(about),
        f"Transformer of {BLOCKS} blocks, d={WIDTH}, {ROWS} rows of {LENGTH} tokens, M={MICRO_BATCHES}, dropout 0.1 "
        f"on attention and residuals; medians of {ROUNDS} rounds in turn, one process, K=2 in two threads.",
        table(["variant", "ms a step"], [[name, f"{value * 1e3:.0f}"] for name, value in medians.items()]),
        "\n".join(f"Keyed against torch's generator, {who}: {value:+.1%}." for who, value in overhead.items()),
        "## Tiny layers: Linear(32) + Tanh + Dropout(0.1), run by one thread",
        table(HEADER, [way.cells(found[0]) for way in found]),
        "\n".join(costs(found)),
    ]
    cells = {way.name: way.figures() for way in found}
    write("keyed", "\n\n".join(text), {"facts": about, "seconds": medians, "overhead": overhead, "tiny": cells})


def costs(found: list[Way]) -> Iterator[str]:
    """In words, what keys and the recorder add to a step of tiny layers."""
    seconds = {way.name: way.figures() for way in found}
    for partitions in ("K=2", "K=1"):
        base = seconds[f"{partitions}, torch's generator"]
        for name in ("keyed", "keyed, with the recorder"):
            more = [mine / its - 1 for mine, its in zip(seconds[f"{partitions}, {name}"], base, strict=True)]
            yield f"{partitions}, {name}, against torch's generator: {more[2]:+.1%}, at the least {more[0]:+.1%}."


if __name__ == "__main__":
    main()
