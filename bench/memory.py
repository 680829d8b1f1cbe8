"""Measures the peak memory of a step over L, K, M and N against O(N + L/K x N/M) (paper, section 2.3).

    python -m bench.memory

The model has L layers of Linear(256) and Tanh. The second step is measured, when gradients exist already, by the
allocator's memory events in the profiler, relative to the memory before the step. All K partitions run in one process
in lockstep, so the formula is multiplied by K: K N boundary rows and the activations of one micro-batch in all L
layers.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import gpipe
from bench.machine import facts
from bench.report import RESULTS, describe, table, write

WIDTH = 256
MIB = 2**20
Shape = tuple[int, int, int, int]  # L, K, M, N


def peak_bytes(layers: int, partitions: int, micro_batches: int, rows: int, remat: str) -> int:
    """Returns the peak of allocated bytes during a step, relative to the bytes before it."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]
    pipe = gpipe.GPipe(blocks, partitions, micro_batches, remat=remat, driver="lockstep", seed=0)
    batch = torch.randn(rows, WIDTH)
    pipe.step(batch, batch, F.mse_loss)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        pipe.step(batch, batch, F.mse_loss)
    results = profiler.profiler.kineto_results
    sizes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    return int(np.cumsum(sizes).max())


def shapes() -> Iterator[Shape]:
    """Returns all combinations of L, K, M and N."""
    return itertools.product((8, 16, 32), (1, 2, 4), (2, 4, 8, 16), (128, 512))


def terms(shape: Shape) -> tuple[float, float, float]:
    """Returns the terms of the formula: boundary rows, rows of activations, and a constant."""
    layers, partitions, micro_batches, rows = shape
    return partitions * rows, layers * rows / micro_batches, 1.0


def fit(measured: dict[Shape, int]) -> tuple[Sequence[float], float]:
    """Fits the bytes per term by least squares, and returns them with the share of explained variance."""
    a = np.array([terms(shape) for shape in measured])
    b = np.array(list(measured.values()), dtype=float)
    coefficients, *_ = np.linalg.lstsq(a, b, rcond=None)
    residual = ((a @ coefficients - b) ** 2).sum() / ((b - b.mean()) ** 2).sum()
    return [float(c) for c in coefficients], float(1 - residual)


def draw(always: dict[Shape, int], never: dict[Shape, int], path: Path) -> None:
    """Draws the peak over L, M and N, with and without recomputation."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True)
    sweeps: list[tuple[str, list[Shape], list[int]]] = [
        ("layers L (K=2, M=8, N=512)", [(n, 2, 8, 512) for n in (8, 16, 32)], [8, 16, 32]),
        ("micro-batches M (K=2, L=32, N=512)", [(32, 2, n, 512) for n in (2, 4, 8, 16)], [2, 4, 8, 16]),
        ("rows N (K=2, L=32, M=8)", [(32, 2, 8, n) for n in (128, 512)], [128, 512]),
    ]
    for axis, (label, points, places) in zip(axes, sweeps, strict=True):
        for name, measured in (("remat never", never), ("remat always", always)):
            axis.plot(places, [measured[point] / MIB for point in points], marker="o", label=name)
        axis.set_xlabel(label)
        axis.set_xticks(places)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("peak MiB of a step")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def line(shape: Shape, always: int, never: int) -> list[str]:
    """Returns a row of the table."""
    return [*map(str, shape), f"{always / MIB:.2f}", f"{never / MIB:.2f}", f"{never / always:.1f}"]


def main() -> None:
    """Measures all combinations, fits the formula, and writes both."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--keep", default="memory", help="write the result under another name")
    name = parser.parse_args().keep
    always = {shape: peak_bytes(*shape, remat="always") for shape in shapes()}
    never = {shape: peak_bytes(*shape, remat="never") for shape in shapes() if shape[1] == 2}
    (boundary, inside, constant), explained = fit(always)
    draw(always, never, RESULTS / f"{name}.svg")
    rows = [line(shape, always[shape], never[shape]) for shape in never if shape[3] == 512]
    text = [
        "# Peak memory of a step",
        describe(facts()),
        f"{len(always)} shapes with remat always: peak = {boundary:.0f} bytes x K N + {inside:.0f} bytes x L N/M + "
        f"{constant / MIB:.2f} MiB explains {explained:.2%} of the variance. A boundary row is {4 * WIDTH} bytes, "
        "and so is a row inside a layer: what Tanh returns is kept once, for itself and for the next Linear.",
        f"![Peak over L, M and N]({name}.svg)",
        table(["L", "K", "M", "N", "remat always MiB", "remat never MiB", "less by"], rows),
    ]
    data = {"facts": facts(), "coefficients": [boundary, inside, constant], "explained": explained}
    peaks = [{"shape": shape, "always": value, "never": never.get(shape)} for shape, value in always.items()]
    write(name, "\n\n".join(text), data | {"peaks": peaks})


if __name__ == "__main__":
    main()
