"""Compares whole backward passes with split ones, layer by layer: `python -m bench.split`."""

import argparse
from statistics import median

import torch

from bench.machine import facts
from bench.report import describe, interval, table, write
from bench.workloads import WORKLOADS
from gpipe.planner.measure import as_in_training, measure_seconds

WORKS = ("transformer", "halves", "conv", "amoebanet")


def rounds(name: str, count: int) -> list[tuple[float, float, float]]:
    """Measures the backward pass of one micro-batch through all layers that have weights, once per round."""
    work, device = WORKLOADS[name], torch.device("cpu")
    layers, (inputs, _) = work.layers(), work.data()
    sample = inputs.tensor_split(work.micro_batches)[0]
    found = []
    with as_in_training(device, 1):
        for _ in range(count):
            every = measure_seconds(layers, sample, device, parts=True)
            some = [
                (each.backward, each.inputs, each.weights)
                for each in every
                if each.inputs is not None and each.weights is not None and each.weights > SOME * each.inputs
            ]
            whole, inputs, weights = (sum(parts) for parts in zip(*some, strict=True))
            found.append((whole, inputs, weights))
    return found


SOME = 0.05
"""W's share of I below which a layer has no products with weights: an embedding, a norm."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.split", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    about, lines = facts(), []
    for name in WORKS:
        found = rounds(name, options.rounds)
        ratios = [(inputs + weights) / whole for whole, inputs, weights in found]
        low, high = interval(ratios)
        parts = [1e3 * median(part) for part in zip(*found, strict=True)]
        shares = median(weights / (inputs + weights) for _, inputs, weights in found)
        lines.append(
            [
                name,
                *(f"{part:.2f}" for part in parts),
                f"{median(ratios):.3f} ({low:.3f}-{high:.3f})",
                f"{shares:.0%}",
            ]
        )
    header = ["layers of", "B, ms", "I, ms", "W, ms", "(I + W) / B (95 %)", "W's share"]
    text = f"# A backward whole and in two parts\n\n{describe(about)}\n\n{table(header, lines)}"
    write("split", text, {"facts": about, "lines": lines})


if __name__ == "__main__":
    main()
