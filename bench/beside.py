"""What a step costs in two checkouts, say before and after a change: their processes take turns in one run.

git worktree add ../before 3ebf3c1
python -m bench.beside ../before
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import gpipe
from bench.machine import facts
from bench.report import describe, spread, table, write
from bench.workloads import WORKLOADS, sleeping

HERE = Path(__file__).parents[1]
WORK = {**WORKLOADS, "sleeping 1 ms": sleeping(0.001)}
ROWS = [("transformer", 1), ("conv", 1), ("tiny", 60), ("sleeping 1 ms", 3)]
REMATS, WAYS = ("never", "always"), ("step", "call")
HEADER = ["work", "remat", "way", "before, ms a step (min-max)", "after", "change", "interval of 95 %"]


def serve(name: str, remat: str, way: str) -> None:
    """Answers each line of input with the seconds of so many steps, the median."""
    step = training(name, remat, way)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(median(seconds)), flush=True)


def training(name: str, remat: str, way: str) -> Callable[[], object]:
    """A step of a workload, in one of the two ways."""
    work = WORK[name]
    inputs, targets = work.data()
    cuts = work.cuts(work.partitions)
    pipe = gpipe.GPipe(
        work.layers(),
        work.partitions if cuts is None else cuts,
        work.micro_batches,
        remat=remat,
    )

    def step() -> None:
        if way == "step":
            pipe.step(inputs, targets, loss_fn=work.loss_fn)
        else:
            work.loss_fn(pipe(inputs), targets).backward()
        pipe.zero_grad(set_to_none=True)

    return step


class Process:
    """A process that trains with the library of one checkout, and the bench of this one."""

    def __init__(self, checkout: Path, *what: str) -> None:
        path = os.pathsep.join([str(checkout / "src"), str(HERE)])
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "bench.beside", "--serve", *what],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def median_of(self, count: int) -> float:
        """Seconds of a step, the median of so many."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(f"{count}\n")
        self.popen.stdin.flush()
        return float(json.loads(self.popen.stdout.readline()))

    def close(self) -> None:
        """Ends it."""
        self.popen.kill()
        self.popen.wait()


def measure(before: Path, what: Sequence[str], steps: int, rounds: int, seconds: float) -> list[list[float]]:
    """The turns of both, in pairs: the one that begins changes from pair to pair."""
    both = [Process(before, *what), Process(HERE, *what)]
    until = time.monotonic() + seconds
    try:
        for process in both:
            process.median_of(2 + steps)
        turns: list[list[float]] = []
        while len(turns) < rounds or (time.monotonic() < until):
            pair = [0.0, 0.0]
            for at in (0, 1) if len(turns) % 2 else (1, 0):
                pair[at] = both[at].median_of(steps)
            turns.append(pair)
        return turns
    finally:
        for process in both:
            process.close()


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Of the median, by bootstrap."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.beside", description=__doc__)
    parser.add_argument("before", nargs="?", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of turns, at least")
    parser.add_argument("--seconds", type=float, default=20, help="for a row, about")
    parser.add_argument("--work", nargs="+", choices=list(dict(ROWS)), default=list(dict(ROWS)))
    parser.add_argument("--keep", default="beside", help="write the result under another name")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    commit = subprocess.check_output(["git", "-C", options.before, "rev-parse", "--short", "HEAD"], text=True).strip()
    lines, data = [], {}
    for name in options.work:
        steps = dict(ROWS)[name]
        for remat in REMATS:
            for way in WAYS:
                turns = measure(options.before, (name, remat, way), steps, options.rounds, options.seconds)
                ratios = [after / before for before, after in turns]
                low, high = interval(ratios)
                lines.append([
                    name, remat, way, *(spread(list(side)) for side in zip(*turns, strict=True)),
                    f"{median(ratios) - 1:+.1%}", f"{low - 1:+.1%} to {high - 1:+.1%}",
                ])  # fmt: skip
                data[f"{name} {remat} {way}"] = turns
                print(*lines[-1], flush=True)
    about = facts()
    text = (
        f"# A step before and after, at {commit} and here\n\n{describe(about)}\n\nThe change is the median of pairs."
    )
    write(options.keep, f"{text}\n\n{table(HEADER, lines)}", {"facts": about, "before": commit, "turns": data})


if __name__ == "__main__":
    main()
