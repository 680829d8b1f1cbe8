"""Measures the paper's Table 2, throughput over K and M, with sleeping layers instead of accelerators.

Each layer sleeps for its share of the network's cost per row: once in the forward pass, twice in the backward pass.
So eight stages run in parallel on any machine. The mini-batch has the same size for all K and M. The paper used the
largest that fit in memory. Recomputation is on, as in the paper.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import torch

import gpipe
from bench.ideal import makespan
from bench.machine import facts
from bench.report import describe, table, write
from bench.workloads import Workload, sleepers, squared_error

PARTITIONS, MICRO_BATCHES, ROWS = (2, 4, 8), (1, 4, 32), 32

AMOEBANET = [
    *(0.0106, 0.0789, 0.1437),
    *(0.411, 0.578, 0.7065, 0.7065, 0.7065, 0.7065, 1.0372),
    *(0.5523, 0.6551, 0.7065, 0.7065, 0.7065, 0.7065, 1.0372),
    *(0.5523, 0.6551, 0.7065, 0.7065, 0.7065, 0.7065, 0.0041),
]
"""GMAC of the forward of each layer of AmoebaNet-D (18, 256) on a 224x224 image."""


@dataclass
class Cell:
    """The results of one K and M for one network."""

    partitions: int
    micro_batches: int
    layers: tuple[int, ...]
    ideal: float
    seconds: list[float] = field(default_factory=list)

    @property
    def rows_per_second(self) -> float:
        """Returns the throughput."""
        return ROWS / median(self.seconds)


@dataclass
class Network:
    """A network with the costs of its layers, and the paper's measurements on TPUs by (K, M)."""

    name: str
    costs: Sequence[float]
    paper: dict[tuple[int, int], float]


NETWORKS = (
    Network(
        "AmoebaNet-D (18, 256)",
        AMOEBANET,
        {
            (2, 1): 1,
            (4, 1): 1.13,
            (8, 1): 1.38,
            (2, 4): 1.07,
            (4, 4): 1.26,
            (8, 4): 1.72,
            (2, 32): 1.21,
            (4, 32): 1.84,
            (8, 32): 3.48,
        },
    ),
    Network(
        "Transformer-48",
        [3.0] * 16,  # each stands for three of the 48 equal layers: sleeps long enough to be exact
        {
            (2, 1): 1,
            (4, 1): 1.07,
            (8, 1): 1.3,
            (2, 4): 1.7,
            (4, 4): 3.2,
            (8, 4): 4.8,
            (2, 32): 1.8,
            (4, 32): 3.4,
            (8, 32): 6.3,
        },
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.table2", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2, help="of the forward of a mini-batch through all layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", default="table2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {network.name: measure(network, options.seconds, options.rounds) for network in NETWORKS}
    about = facts()
    text = f"# Table 2 of the paper, with sleeping layers\n\n{describe(about)}\n\n{EXPLANATION}\n" + "".join(
        f"\n## {network.name}\n\n{show(network, found[network.name])}\n" for network in NETWORKS
    )
    kept = {name: [asdict(cell) for cell in cells] for name, cells in found.items()}
    write(options.keep, text, {"facts": about, "cells": kept})


EXPLANATION = """Throughput relative to K=2, M=1: measured here / of an ideal pipeline of the same costs / in the
paper (TPUv2 and TPUv3, Table 2). In brackets the measured step relative to its own ideal. A recompute hides while the
gradient is under way, which is why more partitions help even at M=1."""


def measure(network: Network, seconds: float, rounds: int) -> list[Cell]:
    """Trains with every K and M in turn, repeatedly."""
    scale = seconds / sum(network.costs) / ROWS
    times = [scale * cost for cost in network.costs]
    work = Workload(
        network.name, "", lambda: sleepers(times), lambda: (torch.randn(ROWS, 4), torch.randn(ROWS, 4)),
        squared_error, 0, 0,
    )  # fmt: skip
    inputs, targets = work.data()
    cells, pipes = [], []
    for micro_batches in MICRO_BATCHES:
        for partitions in PARTITIONS:
            layers, how = work.layers(), {"micro_batches": micro_batches, "balance": "variance"}
            plan = gpipe.find_plan(layers, None, partitions, costs=network.costs, **how)  # type: ignore[arg-type]
            pipe = gpipe.GPipe(layers, plan=plan, seed=0)
            cells.append(Cell(partitions, micro_batches, pipe.layers_per_partition, ideal(times, pipe)))
            pipes.append(pipe)
    for _ in range(rounds):
        for cell, pipe in zip(cells, pipes, strict=True):
            start = time.perf_counter()
            pipe.step(inputs, targets, work.loss_fn)
            cell.seconds.append(time.perf_counter() - start)
    return cells


def ideal(times: Sequence[float], pipe: gpipe.GPipe) -> float:
    """Returns the duration of a step if only sleeping took time."""
    rest = iter(times)
    rows = ROWS / pipe.micro_batches
    forward = [rows * sum(next(rest) for _ in range(layers)) for layers in pipe.layers_per_partition]
    return makespan(forward, [2 * seconds for seconds in forward], pipe.micro_batches, remat=True)


def show(network: Network, cells: Sequence[Cell]) -> str:
    """Returns the table of one network."""
    base = cells[0]
    by_place = {(cell.partitions, cell.micro_batches): cell for cell in cells}

    def shown(partitions: int, micro_batches: int) -> str:
        cell = by_place[partitions, micro_batches]
        measured = cell.rows_per_second / base.rows_per_second
        return (
            f"**{measured:.2f}** / {base.ideal / cell.ideal:.2f} / {network.paper[partitions, micro_batches]:g} "
            f"({median(cell.seconds) / cell.ideal:.3f})"
        )

    header = ["M", *(f"K={partitions}" for partitions in PARTITIONS)]
    lines = [[str(m), *(shown(k, m) for k in PARTITIONS)] for m in MICRO_BATCHES]
    layers = "; ".join(f"K={cell.partitions}: {'+'.join(map(str, cell.layers))}" for cell in cells[: len(PARTITIONS)])
    return f"{table(header, lines)}\n\nLayers of each partition: {layers}."


if __name__ == "__main__":
    main()
