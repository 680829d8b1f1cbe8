"""Compares transfer learning from few examples (paper, Table 5) with training from scratch."""

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.machine import facts
from bench.report import describe, table, write
from bench.runs import FREE, Run, carry_out, carry_out_all

BEFORE, AFTER = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)
FEW = {"per_class": 10, "batch_size": 25, "epochs": 40}
CHANGES: dict[str, dict[str, Any]] = {
    "40 epochs": {},
    "20 epochs": {"epochs": 20},
    "20 epochs, flip and cutout": {"epochs": 20, "flip": True, "cutout": 16},
}
"""The paper flips images and cuts out of them."""
RATES = {"transfer": 0.1, "scratch": 0.05}
"""The learning rates: of 0.02 to 0.2 the best in 40 epochs, on two seeds that are not among the five. From scratch
0.05 and 0.1 do equally well."""


def main() -> None:
    """Trains on some digits, then on few images of the other digits, from these weights and from scratch."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("out/bench/transfer"))
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    pretrained = options.folder / "pretrained"
    before = carry_out(Run("digits", pretrained, {**FREE, "partitions": 2, "classes": BEFORE}))
    rows, kept = [], {}
    for name, changes in CHANGES.items():
        for way, rate in RATES.items():
            start = {"from": pretrained, "partitions": 3} if way == "transfer" else {}
            runs = [
                Run(
                    "digits",
                    options.folder / f"{way}-{name.replace(', ', '-').replace(' ', '-')}-{seed}",
                    {**FREE, **FEW, **changes, "classes": AFTER, "seed": seed, "learning_rate": rate, **start},
                )
                for seed in options.seeds
            ]
            top1 = [one.evaluation["top1"] * 100 for one in carry_out_all(runs, options.at_once)]
            kept[f"{way}, {name}"] = top1
            each = ", ".join(f"{one:.1f}" for one in top1)
            rows.append([f"{way}, {name}", f"{mean(top1):.2f} %", f"{stdev(top1):.2f}", each])
    about = facts()
    first, last = Run("digits", pretrained), Run("digits", options.folder, {**FEW, "classes": AFTER})
    parts = [
        "# Transfer to few examples",
        describe(about),
        f"AmoebaNet-D (3, 32) learns the digits {', '.join(map(str, BEFORE))} (top-1 "
        f"{before.evaluation['top1']:.2%}), "
        f"in two partitions. Then it learns the digits {', '.join(map(str, AFTER))} from {FEW['per_class']} "
        "images of "
        f"each, in epochs of {FEW['per_class'] * len(AFTER) // FEW['batch_size']} steps: all weights "
        "but the softmax layer's are those of the first run, at three partitions; or all are new. Which ten images, "
        f"and all else that is random, differ by seed. Top-1 of the held-out images of these digits, the mean of "
        f"{len(options.seeds)} runs, their standard deviation, and each:",
        table(["", "mean", "spread", "runs"], rows),
        f"Learning rates: {', '.join(f'{way} {rate}' for way, rate in RATES.items())}. By hand: "
        f"`gpipe {' '.join(first.command[:2])} --classes 0 1 2 3 4 --out out/first`, then "
        f"`gpipe {' '.join(last.command[:2])} --from out/first --classes 5 6 7 8 9 --per-class 10 --batch-size 25 "
        "--epochs 20 --learning-rate 0.1`.",
    ]
    write("transfer", "\n\n".join(parts), {"facts": about, "top1": kept})


if __name__ == "__main__":
    main()
