"""What keyed randomness costs: a Transformer with dropout 0.1, with and without the visit around its layers.

    python -m bench.keyed

Eight blocks, d=256, sequence 128, 16 rows, M=8. `loop` runs the plain layers micro-batch by micro-batch, `pipe` two
partitions in two threads. Without a key the threads draw from torch's one generator, in any order: the numbers are
then wrong, but it is what keying must be compared with. Variants take turns in one process; medians of the rounds.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

import gpipe
from bench.machine import facts
from bench.report import describe, table, write
from gpipe.models import transformer_lm
from gpipe.run.guard import RandomGuard

ROUNDS = 9
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

    def unkeyed() -> None:
        for stage in piped._engine.stages:
            for layer in stage.layers:
                layer.draws = {True: False}
        check, RandomGuard.check = RandomGuard.check, lambda self, layers: None  # type: ignore[method-assign]
        try:
            step()
        finally:
            RandomGuard.check = check  # type: ignore[method-assign]

    return step if keyed else unkeyed


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


def main() -> None:
    medians = measure()
    overhead = {
        who: medians[f"{who}, dropout, keyed"] / medians[f"{who}, dropout, torch's generator"] - 1
        for who in ("loop", "pipe")
    }
    text = [
        "# What keyed randomness costs",
        describe(facts()),
        f"Transformer of {BLOCKS} blocks, d={WIDTH}, {ROWS} rows of {LENGTH} tokens, M={MICRO_BATCHES}, dropout 0.1 "
        f"on attention and residuals; medians of {ROUNDS} rounds in turn, one process, K=2 in two threads.",
        table(["variant", "ms a step"], [[name, f"{value * 1e3:.0f}"] for name, value in medians.items()]),
        "\n".join(f"Keyed against torch's generator, {who}: {value:+.1%}." for who, value in overhead.items()),
    ]
    write("keyed", "\n\n".join(text), {"facts": facts(), "seconds": medians, "overhead": overhead})


if __name__ == "__main__":
    main()
