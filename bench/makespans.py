"""Compares each schedule with its own prediction if layers only sleep: `python -m bench.makespans`.

Each stage is one layer that sleeps for the same time in its forward pass, its input-gradient pass and its
weight-gradient pass. So the overhead of the runtime is visible on a machine of any size.
"""

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from bench.machine import facts
from bench.report import describe, interval, table, write
from gpipe.schedule.cost import StageCost
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.simulate import simulate


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient.clone(), None


def _sleep(seconds: float, _: Tensor) -> None:
    time.sleep(seconds)


class Sleeper(nn.Module):
    """A small matrix product that sleeps in each of its passes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(4, 4, bias=False)
        self.linear.weight.register_post_accumulate_grad_hook(partial(_sleep, seconds))

    def forward(self, x: Tensor) -> Tensor:
        """Sleeps and multiplies."""
        made: Tensor = self.linear(_Sleep.apply(x, self.seconds))
        return made


def one_sleep(seconds: float) -> float:
    """Returns how long a sleep of this duration really takes."""
    taken = []
    for _ in range(50):
        start = time.perf_counter()
        time.sleep(seconds)
        taken.append(time.perf_counter() - start)
    return median(taken)


def measure(name: str, options: argparse.Namespace) -> list[str]:
    """Measures steps of a pipe with one schedule, and compares them with the prediction."""
    stages = options.ranks * SCHEDULES[name].stages_per_rank
    layers = [Sleeper(options.seconds) for _ in range(stages)]
    x, y = torch.randn(options.micro_batches, 4), torch.randn(options.micro_batches, 4)
    taken, foretold = [], []
    with gpipe.GPipe(layers, options.ranks, options.micro_batches, schedule=name, remat="never", seed=0) as pipe:
        units = simulate(pipe.program, [StageCost(1.0, 2.0)] * stages).timeline.seconds
        for _ in range(options.rounds + 1):
            foretold.append(units * one_sleep(options.seconds))
            start = time.perf_counter()
            pipe.step(x, y, F.mse_loss)
            taken.append(time.perf_counter() - start)
    ratios = [real / table for real, table in zip(taken[1:], foretold[1:], strict=True)]
    low, high = interval(ratios)
    nominal = median(taken[1:]) / (units * options.seconds)
    return [
        name, f"{units:g}", f"{median(foretold) * 1e3:.0f}", f"{median(taken[1:]) * 1e3:.0f}",
        f"{median(ratios):.4f} ({low:.4f}-{high:.4f})", f"{nominal:.4f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.makespans", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.01, help="of F, I and W of a stage, each")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    about = facts()
    header = [
        "schedule", "table, units", "table, ms", "step, ms", "step / table (95 %)", "by the sleep that was asked for"
    ]  # fmt: skip
    text = table(header, [measure(name, options) for name in SCHEDULES])
    size = f"K={options.ranks}, M={options.micro_batches}, a unit of {options.seconds * 1e3:g} ms, threads."
    heading = f"# Schedules against their tables, with sleeping layers\n\n{describe(about)}\n\n{size}"
    write("makespans", f"{heading}\n\n{text}", {"facts": about, "options": vars(options), "table": text})


if __name__ == "__main__":
    main()
