"""Measures steps of sequences of unequal lengths, by how they are packed: `python -m bench.packing`.

The stages sleep for the cost of a micro-batch, in the forward and in the backward pass. The lengths are log-normal.
"""

import argparse
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from bench.machine import facts
from bench.report import describe, spread, table

K, M, N = 4, 8, 128
A, B, C = 0.0, 1.0, 1 / 24576


def cost(length: float) -> float:
    return A + B * length + C * length * length


def draw_lengths(seed: int) -> list[int]:
    """Draws N log-normal lengths with median 512 and sigma 1, clipped to 64 to 4,096."""
    chance = random.Random(seed)
    return [min(4096, max(64, round(512 * chance.lognormvariate(0, 1)))) for _ in range(N)]


class Sleep(torch.autograd.Function):
    """Sleeps for the same number of seconds in forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """Sleeps in proportion to the second dimension of its input."""

    def __init__(self, second: float) -> None:
        super().__init__()
        self.second, self.weight = second, nn.Parameter(torch.ones(()))

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = Sleep.apply(rows * self.weight, rows.shape[1] * self.second)
        return made


def step_seconds(costs: Sequence[float], seconds: float, total: float, schedule: Any) -> float:
    """Returns the median duration of a step. A stage computes a cost of `total` in `seconds`."""
    units = [max(1, round(1000 * value / total)) for value in costs]
    pipe = gpipe.GPipe([Sleeper(seconds / 1000) for _ in range(K)], K, M, schedule=schedule, remat="never")
    batch = gpipe.MicroBatches([torch.ones(1, count) for count in units])
    took = []
    with pipe:
        for _ in range(4):
            start = time.perf_counter()
            pipe.step(batch, batch, lambda output, _: output.mean())
            took.append(time.perf_counter() - start)
    return median(took[1:])


def measure(seed: int, seconds: float, schedule: str) -> dict[str, float]:
    """Returns the duration of a step by how the sequences are packed, over the lower bound for all ways to pack."""
    lengths = draw_lengths(seed)
    each, total = [cost(length) for length in lengths], sum(map(cost, lengths))
    arrival = [list(range(first, first + N // M)) for first in range(0, N, N // M)]

    def unpadded(groups: Sequence[Sequence[int]]) -> list[float]:
        return [sum(each[row] for row in group) for group in groups]

    def padded(groups: Sequence[Sequence[int]]) -> list[float]:
        return [len(group) * max(each[row] for row in group) for group in groups]

    ways = {
        "packed": unpadded(gpipe.pack(lengths, M, cost=(A, B, C))),
        "order of arrival, not padded": unpadded(arrival),
        "packed, padded per micro-batch": padded(gpipe.pack(lengths, M, cost=(A, B, C), padded=True)),
        "order of arrival, padded per micro-batch": padded(arrival),
        "order of arrival, padded to the longest of all": [N // M * max(each)] * M,
    }
    least = 2 * (total + (K - 1) * max(total / M, *each)) * seconds / total
    return {way: step_seconds(costs, seconds, total, schedule) / least for way, costs in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.packing", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many sets of lengths")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a pass of all sequences through a stage")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe(facts()))
    for schedule in ("gpipe", "1f1b"):
        found = [measure(seed, options.seconds, schedule) for seed in range(options.seeds)]
        rows = [
            [way, spread([one[way] for one in found], 1), spread([one[way] / one["packed"] for one in found], 1)]
            for way in found[0]
        ]
        print("\n" + table([f"{schedule}: micro-batches", "step / lower bound", "step / packed"], rows))


if __name__ == "__main__":
    main()
