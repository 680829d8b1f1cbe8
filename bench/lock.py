"""Measures how much of a layer may hold the interpreter lock before rank threads wait: `python -m bench.lock`.

The layers behave like GPU layers seen from the host. One part of each kernel's time is the launch, which holds the
interpreter lock. In the other part, the device computes and the host sleeps. The results are the times of K ranks in
threads and in processes, relative to the time of one stage in the reference loop, times (M+K-1)/M.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe
from bench.machine import facts
from bench.report import describe, table, write

KERNELS, KERNEL_SECONDS = 10, 250e-6
M, STEPS = 32, 5
RANKS = (2, 4, 8)
HELD = (0.02, 0.1, 0.2, 0.4)
"""The parts of a kernel's time that its launch takes."""


def launch(held: float) -> None:
    """Launches this number of kernels one after another."""
    for _ in range(KERNELS):
        until = time.perf_counter() + held * KERNEL_SECONDS
        while time.perf_counter() < until:
            pass
        time.sleep((1 - held) * KERNEL_SECONDS)


class Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, held: float) -> Tensor:
        ctx.held = held
        launch(held)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        launch(ctx.held)
        return gradients[0], None


class Launches(nn.Module):
    """A stage that launches the same number of kernels in the forward and the backward pass."""

    def __init__(self, held: float) -> None:
        super().__init__()
        self.weight, self.held = nn.Parameter(torch.ones(4)), held

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = Kernels.apply(value * self.weight, self.held)
        return made


def seconds(step: Callable[[], object]) -> float:
    """Returns the median duration of a step."""
    took = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return median(took[1:])


def alone(held: float) -> float:
    """Measures one stage with a mini-batch in the reference loop."""
    layer, rows = Launches(held), torch.ones(M, 4).tensor_split(M)

    def step() -> None:
        for row in rows:
            mse_loss(layer(row), row).backward()

    return seconds(step)


def piped(held: float, ranks: int, driver: Any) -> float:
    """Measures a mini-batch in a pipe of this number of stages."""
    layers = [Launches(held) for _ in range(ranks)]
    pipe = gpipe.GPipe(layers, ranks, M, driver=driver, remat="never", seed=0)
    rows = torch.ones(M, 4)
    return seconds(lambda: pipe.step(rows, rows, mse_loss))


def serve(ranks: int) -> None:
    """Runs one rank of several processes, and prints the durations of steps as JSON for each value of HELD."""
    dist.init_process_group("gloo")
    took = [piped(held, ranks, "process") for held in HELD]
    if not dist.get_rank():
        print(json.dumps(took), flush=True)
    dist.destroy_process_group()


def in_processes(ranks: int) -> list[float]:
    """Measures steps with one process per rank for each value of HELD."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.lock", "--serve", str(ranks)],
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate()[0] for process in started]
    found: list[float] = json.loads(said[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lock", description=__doc__)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.serve:
        serve(options.serve)
        return
    about, found = facts(), list[tuple[int, float, list[float], list[float]]]()
    rows: list[Sequence[str]] = []
    for ranks in RANKS:
        threads: list[list[float]] = [[] for _ in HELD]
        processes: list[list[float]] = [[] for _ in HELD]
        for _ in range(options.rounds):
            apart = in_processes(ranks)
            for at, held in enumerate(HELD):
                ideal = alone(held) * (M + ranks - 1) / M
                threads[at].append(piped(held, ranks, "threads") / ideal)
                processes[at].append(apart[at] / ideal)
        for held, some, others in zip(HELD, threads, processes, strict=True):
            found.append((ranks, held, some, others))
            figures = f"{median(some):.2f}", f"{median(others):.2f}"
            rows.append([str(ranks), f"{held:.0%}", f"{ranks * held:.2g}", *figures])
            print(*rows[-1], flush=True)
    head = ["K", "of a kernel, its launch", "K times that", "threads, over ideal", "processes"]
    parts = ["# Ranks as threads, and the interpreter's lock", describe(about), table(head, rows)]
    write("lock", "\n\n".join(parts), {"facts": about, "ratios": found})


if __name__ == "__main__":
    main()
