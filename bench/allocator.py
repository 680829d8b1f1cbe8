"""What it gains to keep freed memory: glibc gives large blocks back to the system and takes fresh pages for others.

A residual conv net with BatchNorm, with remat and without, in fresh processes that take turns; tiny layers, whose
many small blocks show what one heap for all threads costs; and sums of large tensors in a thread. Memory is kept by
`gpipe.keep_freed_memory`, which calls `mallopt` in the process, or by the variables that glibc reads when a process
starts. Wall time suffers from whatever else the machine does; CPU time, of all threads, hardly.
"""

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import gpipe
from bench.machine import facts, forget_peak, peak_resident_bytes
from bench.report import describe, spread, table, write

CUTS = {"conv": (4, 6), "tiny": (4, 4)}
BLOCKS = {f"{mib} MiB": mib for mib in (8, 24, 40, 80)}
REMATS = ("never", "always")


@dataclass(frozen=True)
class Way:
    """How memory is kept: what is called in the process, and what stands in its environment."""

    title: str
    call: Callable[[], bool] = lambda: True
    environment: Mapping[str, str] = field(default_factory=dict)


WAYS = {
    "default": Way("as glibc has it"),
    "keep": Way("`gpipe.keep_freed_memory()`", lambda: gpipe.keep_freed_memory()),
    "one heap": Way("`gpipe.keep_freed_memory(one_heap=True)`", lambda: gpipe.keep_freed_memory(one_heap=True)),
    "environment": Way(
        "`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`",
        environment={"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"},
    ),
}


@dataclass
class Steps:
    """What some steps took, for each of them."""

    seconds: list[float]
    user: float
    system: float
    faults: float
    peak_mib: float

    @property
    def wall(self) -> float:
        """Seconds of a step, the median."""
        return median(self.seconds)

    @property
    def cpu(self) -> float:
        """CPU seconds of a step, the mean."""
        return self.user + self.system


def serve(name: str, workload: str, remat: str) -> None:
    """Builds the pipe, and answers each line of input with so many steps."""
    logging.getLogger("gpipe").setLevel(logging.ERROR)
    assert WAYS[name].call()
    step = sums(BLOCKS[workload]) if workload in BLOCKS else training(workload, remat)
    for line in sys.stdin:
        forget_peak()
        print(json.dumps(asdict(run(step, int(line)))), flush=True)


def training(workload: str, remat: str) -> Callable[[], object]:
    """A step of a pipe."""
    import torch

    from bench.workloads import WORKLOADS

    work = WORKLOADS[workload]
    inputs, targets = work.data()
    torch.set_num_threads(1)
    pipe = gpipe.GPipe(work.layers(), CUTS[workload], work.micro_batches, remat=remat, seed=0)
    return lambda: pipe.step(inputs, targets, work.loss_fn)


def sums(mib: int) -> Callable[[], object]:
    """Ten sums into tensors of a size, in a thread, each freed before the next."""
    import torch

    torch.set_num_threads(1)
    one, thread = torch.ones(mib * 2**18), ThreadPoolExecutor(1)
    thread.submit(torch.set_num_threads, 1).result()

    def add() -> None:
        for _ in range(10):
            one + one  # the sum is dropped at once

    return lambda: thread.submit(add).result()


def run(step: Callable[[], object], count: int) -> Steps:
    """Runs and measures so many steps."""
    before, seconds = resource.getrusage(resource.RUSAGE_SELF), []
    for _ in range(count):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Steps(
        seconds,
        (after.ru_utime - before.ru_utime) / count,
        (after.ru_stime - before.ru_stime) / count,
        (after.ru_minflt - before.ru_minflt) / count,
        peak_resident_bytes() / 2**20,
    )


class Process:
    """A fresh process that keeps memory in one way."""

    def __init__(self, name: str, workload: str, remat: str) -> None:
        command = [sys.executable, "-m", "bench.allocator", "--serve", name, workload, remat]
        self.popen = subprocess.Popen(
            command,
            env={**os.environ, **WAYS[name].environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def steps(self, count: int) -> Steps:
        """Has it run some steps."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(f"{count}\n")
        self.popen.stdin.flush()
        return Steps(**json.loads(self.popen.stdout.readline()))

    def close(self) -> None:
        """Ends it."""
        self.popen.kill()
        self.popen.wait()


def measure(workload: str, remat: str, rounds: int, steps: int) -> dict[str, list[Steps]]:
    """Gives each way a turn, again and again."""
    processes = {name: Process(name, workload, remat) for name in WAYS}
    steps *= 20 if workload == "tiny" else 1
    try:
        for process in processes.values():
            process.steps(3)
        turns: dict[str, list[Steps]] = {name: [] for name in WAYS}
        for _ in range(rounds):
            for name, process in processes.items():
                turns[name].append(process.steps(steps))
        return turns
    finally:
        for process in processes.values():
            process.close()


def rows(turns: Mapping[str, list[Steps]]) -> list[list[str]]:
    """The table of one workload."""
    default = turns["default"]
    return [
        [
            WAYS[name].title, spread([turn.wall for turn in own]), change(own, default, lambda turn: turn.wall),
            spread([turn.cpu for turn in own]), change(own, default, lambda turn: turn.cpu),
            spread([turn.system for turn in own]), f"{median(turn.faults for turn in own):,.0f}",
            f"{max(turn.peak_mib for turn in own):.0f}",
        ]
        for name, own in turns.items()
    ]  # fmt: skip


def change(own: Sequence[Steps], default: Sequence[Steps], value: Callable[[Steps], float]) -> str:
    """By how much a value differs from the default's of the same round, median over rounds."""
    return f"{median(value(one) / value(other) - 1 for one, other in zip(own, default, strict=True)):+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.allocator", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=[*CUTS, *BLOCKS], default=[*CUTS, *BLOCKS])
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        name, workload, remat = options.serve
        serve(name, workload, remat)
        return
    about = facts()
    text = [
        f"# Freed memory, kept or given back\n\n{describe(about)}\n\nK=2, {options.rounds} rounds in turn. A change "
        f"is the median of the rounds' own. CPU time is of all threads."
    ]
    data: dict[str, Any] = {"facts": about}
    header = [
        "", "step ms (min-max)", "change", "CPU ms a step", "change", "of it in the system", "page faults a step",
        "peak MiB",
    ]  # fmt: skip
    for workload in options.workloads:
        for remat in REMATS if workload in CUTS else ["never"]:
            turns = measure(workload, remat, options.rounds, options.steps)
            title = f"{workload}, remat={remat}" if workload in CUTS else f"ten sums of {workload} in a thread"
            text.append(f"**{title}**\n\n{table(header, rows(turns))}")
            data[f"{workload} {remat}"] = {name: [asdict(turn) for turn in own] for name, own in turns.items()}
    write("allocator", "\n\n".join(text), data)


if __name__ == "__main__":
    main()
