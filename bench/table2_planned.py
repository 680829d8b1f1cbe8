"""Computes the paper's Tables 2 and 3 with the planner, and measures Table 2 for K=2 on two cores.

    python -m bench.table2_planned

The networks have the paper's sizes. All layers together take the time of their operations on the paper's device, and
each layer its share of the time measured on one core. Fill-drain, 32 rows, full recomputation, devices with unlimited
memory. The paper used as many rows as fit in memory. Table 3 uses other devices: P100s with slow PCIe.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median

import torch
from torch import Tensor, nn

import gpipe
from bench.machine import busy_seconds, cpu_seconds, facts
from bench.report import describe, table, with_time_left, write
from bench.table1 import RMSPROP, WORDS, plan_of
from bench.table2 import MICRO_BATCHES, NETWORKS, PARTITIONS, ROWS
from bench.workloads import WORKLOADS
from gpipe.models import amoebanet_d, transformer_lm
from gpipe.planner.measure import as_in_training, measure_seconds
from gpipe.planner.profile import profile_layers
from gpipe.planner.search.device import PRESETS, Device
from gpipe.planner.search.profile import Line, Profile
from gpipe.schedule.lower import place_recompute, place_transfers
from gpipe.schedule.simulate import simulate

CPU = torch.device("cpu")
PIXELS, FEWER_WORDS = 224, 128
SLOW_M = 32
TABLE3 = {"AmoebaNet-D (18, 128)": {2: 1.0, 4: 1.7, 8: 2.7}, "Transformer-24": {2: 1.0, 4: 1.8, 8: 3.3}}
"""By K: what the paper measured with P100s of one host, M=32."""
REAL = ("transformer-64", "amoebanet")
"""What is measured for K=2."""


@dataclass(frozen=True)
class Cell:
    """The rows per second of one network, K and M."""

    network: str
    partitions: int
    micro_batches: int
    layers: tuple[int, ...]
    rows_per_second: float


@dataclass(frozen=True)
class Run:
    """Predicted and measured seconds of a mini-batch on two cores, and the number of cores used by others."""

    network: str
    micro_batches: int
    foretold: float
    measured: float
    others: float


def measured_layers(
    layers: Sequence[nn.Module], seen: Tensor, example: Callable[[int], Tensor], device: Device
) -> Profile:
    """What layers cost on a device: all together what their operations take there, each its share of a core's time.

    Args:
        layers: In order.
        seen: A row on which they are measured.
        example: From a number of rows to what is counted: as large as in the paper.
        device: Of the paper.
    """
    with as_in_training(CPU, threads=1):
        seconds = measure_seconds(layers, seen, CPU)
    names = list(map(str, range(len(layers))))
    counted = profile_layers(layers, {rows: example(rows) for rows in (1, 2)}, names, optimizer_numbers=RMSPROP)
    flops = sum(layer.forward.per_row + layer.backward.per_row for layer in counted.layers)
    faster = sum(each.forward + each.backward for each in seconds) * device.flops / flops
    return Profile(
        tuple(
            replace(layer, forward=Line(per_row=each.forward / faster), backward=Line(per_row=each.backward / faster))
            for layer, each in zip(counted.layers, seconds, strict=True)
        ),
        "seconds",
    )


def amoebanet(filters: int, device: Device) -> Profile:
    """Returns AmoebaNet-D with 18 layers for images of 224x224 pixels."""
    return measured_layers(
        amoebanet_d(18, filters),
        torch.randn(1, 3, PIXELS, PIXELS),
        lambda rows: torch.randn(rows, 3, PIXELS, PIXELS),
        device,
    )


def transformer(layers: int, device: Device) -> Profile:
    """Returns the Transformer of the paper's Table 1. All blocks cost the same, measured on shorter sequences."""
    one = measured_layers(
        transformer_lm(1),
        torch.zeros(1, FEWER_WORDS, dtype=torch.int64),
        lambda rows: torch.zeros(rows, WORDS, dtype=torch.int64),
        device,
    )
    embedding, block, head = one.layers
    return Profile((embedding, *[block] * layers, head), "seconds")


def foretold(network: str, profile: Profile, device: Device, partitions: int, micro_batches: int) -> Cell:
    """Returns the planner's split points, and the simulated time with full recomputation, as in the paper."""
    plan = plan_of(profile, [replace(device, memory=math.inf)] * partitions, ROWS, [micro_batches])
    assert plan is not None  # it has any memory
    bare = plan.shape.program()
    assert bare is not None
    program = place_transfers(place_recompute(bare, ["always"] * bare.stages, halved=True))  # the last stage's too
    seconds = simulate(program, plan.costs).timeline.seconds
    return Cell(network, partitions, micro_batches, plan.layers_per_partition, ROWS / seconds)


def on_two_cores(name: str, micro_batches: int, steps: int) -> Run:
    """Plans a mini-batch by measured costs, and trains some."""
    work = WORKLOADS[name]
    inputs, targets = work.data()
    layers = work.layers()
    plan = gpipe.find_plan(
        layers, inputs, 2, partitions=2, micro_batches=micro_batches, schedule="gpipe", measure=True
    )
    seconds, busy = [], busy_seconds() - cpu_seconds(os.getpid())
    with gpipe.GPipe(layers, plan=plan, seed=0) as pipe:
        for _ in range(steps + 1):
            start = time.perf_counter()
            pipe.step(inputs, targets, work.loss_fn)
            seconds.append(time.perf_counter() - start)
    others = (busy_seconds() - cpu_seconds(os.getpid()) - busy) / sum(seconds)
    return Run(work.title, micro_batches, plan.seconds, median(seconds[1:]), others)


def shown(cells: Sequence[Cell], paper: dict[tuple[int, int], float]) -> str:
    """Formats the throughput relative to the first cell: here / in the paper."""
    by_place = {(cell.partitions, cell.micro_batches): cell for cell in cells}
    base = cells[0].rows_per_second

    def text(place: tuple[int, int]) -> str:
        cell = by_place[place]
        return f"**{cell.rows_per_second / base:.2f}** / {paper[place]:g}"

    partitions, micro_batches = ({place[at] for place in by_place} for at in (0, 1))
    lines = [[str(m), *(text((k, m)) for k in sorted(partitions))] for m in sorted(micro_batches)]
    return table(["M", *(f"K={k}" for k in sorted(partitions))], lines)


def simulated() -> Iterator[tuple[str, str, list[Cell], str]]:
    """Returns for each network of Tables 2 and 3 the table's number, its name, the cells, and the comparison."""
    for network, (make, size, preset) in zip(
        NETWORKS, ((amoebanet, 256, "tpuv2"), (transformer, 48, "tpuv3")), strict=True
    ):
        profile = make(size, device := PRESETS[preset])
        places = product(MICRO_BATCHES, PARTITIONS)
        cells = [foretold(network.name, profile, device, k, m) for m, k in places]
        yield "Table 2", f"{network.name}, {preset}", cells, shown(cells, network.paper)
    for (name, paper), (make, size) in zip(TABLE3.items(), ((amoebanet, 128), (transformer, 24)), strict=True):
        profile = make(size, device := PRESETS["p100"])
        cells = [foretold(name, profile, device, k, SLOW_M) for k in PARTITIONS]
        yield "Table 3", f"{name}, p100", cells, shown(cells, {(k, SLOW_M): ratio for k, ratio in paper.items()})


def real(runs: Sequence[Run]) -> str:
    """Returns the predicted and measured speed relative to M=1."""
    base = {run.network: run for run in reversed(runs)}
    lines = [
        [
            run.network,
            str(run.micro_batches),
            f"{run.foretold:.3f} / {run.measured:.3f}",
            f"{base[run.network].foretold / run.foretold:.2f}",
            f"**{base[run.network].measured / run.measured:.2f}**",
            f"{run.others:.1f}",
        ]
        for run in runs
    ]
    return table(
        ["K=2 on two cores", "M", "seconds, foretold / measured", "speed foretold", "measured", "cores of others"],
        lines,
    )


def main() -> None:
    """Measures layers, plans, trains on two cores, and writes the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.table2_planned", description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="that are measured on two cores; 0: only plan")
    parser.add_argument("--keep", default="table2_planned", help="write the result under another name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about, parts, kept = facts(), list[str](), list[Cell]()
    for number, title, cells, beside in simulated():
        print(f"{number}: {title}\n{beside}", flush=True)
        parts.append(f"## {number}: {title}\n\n{beside}")
        kept += cells
    places = list(product(REAL if options.steps else (), MICRO_BATCHES))
    runs = [on_two_cores(name, m, options.steps) for name, m in with_time_left(places, "on two cores")]
    text = [
        "# Tables 2 and 3 of the paper by the planner",
        describe(about),
        "Throughput relative to K=2 and the least M: planned here / in the paper. A mini-batch has 32 rows for all K "
        "and M, the paper's as many as memory allowed; all is recomputed, as there, even "
        "where a backward follows its own forward, which this library leaves out. The planner has messages "
        "under way while ranks compute, and takes small micro-batches to be as fast a row as large ones, which they "
        "are not on an accelerator: with M=32 there is more to gain here.",
        *parts,
    ]
    if runs:
        text += [
            "## Table 2 for real, K=2",
            "No link and no memory bounds these, so nothing is recomputed: speed relative to M=1. Where others "
            "use a core, one of two is left, and no pipeline is faster.",
            real(runs),
        ]
    data = {"facts": about, "cells": [asdict(cell) for cell in kept], "runs": [asdict(run) for run in runs]}
    write(options.keep, "\n\n".join(text), data)


if __name__ == "__main__":
    main()
