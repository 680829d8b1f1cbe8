"""Measures the paper's Table 4 (NeurIPS), where the time of a step goes: `python -m bench.table4`.

The model is AmoebaNet-D in two partitions. The paper used accelerators and a larger model, and does not state M. Two
CPU cores differ from accelerators: the ranks share the memory and caches of the machine with each other and with
other processes.
"""

import argparse
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

import gpipe
from bench.machine import facts
from bench.report import describe, table, write
from gpipe.models import amoebanet_d

PAPER = {
    "computation": 65.6,
    "recompute": 22.5,
    "bubble": 4.1,
    "load imbalance": 3.2,
    "setup": 2.9,
    "weight update": 1.7,
}
PARTS: dict[str, Sequence[str]] = {
    "computation": ("forward", "backward"),
    "recompute": ("recompute",),
    "bubble": ("bubble",),
    "load imbalance": ("imbalance",),
    "setup": ("late starts", "communication", "host", "data", "between steps"),
    "weight update": ("weight update", "reduction"),
}
"""The paper's parts, and which of ours they are."""


WHY_THEY_DIFFER = (
    "Recompute weighs more here since a backward lasts {:.2f} forwards on these cores, with few filters and few "
    "rows; in the paper about two, as 22.5 of 65.6 says. Two cores share memory and caches, so that both parts take "
    "longer together than each alone, which no part of the table tells; what others take of the machine lengthens "
    "all. The bubble follows from K and M alone, and the paper's M is not known. Imbalance depends on "
    "where the cuts fall."
)


def main() -> None:
    """Trains some steps, and compares where their time went."""
    parser = argparse.ArgumentParser(prog="python -m bench.table4", description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--rows", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, classes = torch.randn(options.rows, 3, 64, 64), torch.randint(10, (options.rows,))
    m, layers = options.micro_batches, amoebanet_d(6, 48, 10)
    with gpipe.GPipe(layers, 2, m, sample=images, remat="always") as pipe:
        optimizer = torch.optim.RMSprop(pipe.parameters())
        pipe.step(images, classes, cross_entropy)
        with gpipe.record(pipe) as recording:
            for _ in range(options.steps):
                pipe.step(images, classes, cross_entropy)
                optimizer.step()
                optimizer.zero_grad()
    found = recording.breakdown()
    lines = []
    for name, paper in PAPER.items():
        share = sum(found.shares.get(part, 0.0) for part in PARTS[name])
        lines.append([name, f"{100 * share:.1f} %", f"{paper} %", ", ".join(PARTS[name])])
    about = facts()
    parts = [
        "# Where a step's time goes, beside the paper's Table 4",
        describe(about),
        f"AmoebaNet-D (6, 48), 64x64, K=2, M={m}, remat always, threads; a step takes {found.seconds:.2f} s. The "
        f"bubble of equal stages is {found.theory:.1%} of the pipeline.",
        table(["part", "here", "paper", "which are"], lines),
        WHY_THEY_DIFFER.format(found.shares["backward"] / found.shares["forward"]),
        f"```text\n{recording}\n```",
        recording.explain(),
    ]
    write("table4", "\n\n".join(parts), {"facts": about, "shares": dict(found.shares), "paper": PAPER})


if __name__ == "__main__":
    main()
