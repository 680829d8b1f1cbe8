"""Measures the accuracy of `gpipe train digits` over seeds, and its losses at other K and under torchrun."""

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.machine import facts
from bench.report import describe, table, write
from bench.runs import FREE, Run, carry_out, carry_out_all

WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "K=1, threads, remat never": ({"partitions": 1, "remat": "never"}, 0),
    "K=2, threads": ({"partitions": 2}, 0),
    "K=3, threads, 1f1b": ({"partitions": 3, "schedule": "1f1b"}, 0),
    "K=2, torchrun, two processes": ({"partitions": 2}, 2),
    "K=3, torchrun, three processes": ({"partitions": 3, "schedule": "zb_h1"}, 3),
}
SHORT = {"epochs": 3}


def main() -> None:
    """Trains with several seeds, then a few epochs with other K and under torchrun."""
    parser = argparse.ArgumentParser(prog="python -m bench.digits", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("out/bench/digits"))
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    runs = [Run("digits", options.folder / f"seed-{seed}", {**FREE, "seed": seed}) for seed in options.seeds]
    found = carry_out_all(runs, options.at_once)
    top1 = [one.evaluation["top1"] * 100 for one in found]
    paper = Run("digits", options.folder / "paper", {**FREE, "config": "paper", "epochs": 20})
    as_paper = carry_out(paper)
    same = {}
    for name, (how, processes) in WAYS.items():
        run = Run("digits", options.folder / f"way-{'-'.join(name.split())}", {**SHORT, **how}, processes)
        same[name] = [line["loss"] for line in carry_out(run, None).epochs]
    about = facts()
    equal = len({tuple(losses) for losses in same.values()}) == 1
    parts = [
        "# The digits: accuracy, and losses that do not depend on K",
        describe(about),
        "`gpipe train digits`, 15 epochs, evaluated by `gpipe evaluate`: 356 held-out images, each as a whole. "
        "Top-1, "
        f"mean {mean(top1):.2f} %, standard deviation {stdev(top1):.2f}:",
        table(
            ["seed", "top-1", "top-5"],
            [
                [str(seed), f"{one.evaluation['top1']:.2%}", f"{one.evaluation['top5']:.2%}"]
                for seed, one in zip(options.seeds, found, strict=True)
            ],
        ),
        "The paper's training (`--config paper`: auxiliary head, ScheduledDropPath, RMSProp, smoothed labels, "
        "average of "
        f"weights, exponential decay) on the same network, 72x72, 20 epochs: {as_paper.evaluation['top1']:.2%}.",
        f"The losses of three epochs, {'equal to the last digit' if equal else 'NOT EQUAL'}:",
        table(
            ["", *(f"epoch {i}" for i in (1, 2, 3))], [[name, *map(repr, losses)] for name, losses in same.items()]
        ),
    ]
    kept = {"facts": about, "top1": top1, "paper": as_paper.evaluation["top1"], "losses": same}
    write("digits", "\n\n".join(parts), kept)


if __name__ == "__main__":
    main()
