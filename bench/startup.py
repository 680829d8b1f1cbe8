"""What it takes to begin: `import gpipe` beyond torch's own import, a pipe of 1000 layers, a training's first step.

The training is `gpipe train digits`, from the command on, in one process and under torchrun.

Each round is a fresh process. Bytecode is kept, as in an installed package; the first process writes it.
"""

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.machine import facts
from bench.report import describe, spread, table, write

LAYERS, PARTITIONS, MICRO_BATCHES = 1000, 8, 32
PROCESSES = (0, 2, 4)

TITLES = {
    "import torch": "`import torch`",
    "import gpipe": "`import gpipe` after it",
    "gpipe.GPipe": "`gpipe.GPipe`, first use: loads the runtime",
    "construct": "construction, costs by parameters",
    "construct again": "construction, a second pipe",
    "program": "the program of a step, made by the first step",
    "measured": "construction, costs measured on a sample",
}

TRAINING = {
    "torch": "torch is there",
    "met": "the processes have met",
    "built": "the pipe and the optimizer are there",
}
TRAINING |= {"step": "the first step is done"}
"""The marks of a training, in seconds since the command was given."""

PARTS = {
    "arguments.settle": "arguments read and checked",
    "arguments._find_costs": "· costs",
    "partition.partition": "· cuts",
    "layers.cut_into_stages": "layers moved to their devices",
    "engine.__init__": "shared parameters looked for",
    "doctor.examine": "looked over for advice",
    "pipeline.program": "the program of a step",
    "laws.check": "· its laws checked",
}
"""The functions of which the profile tells, with a dot inside the one above."""


def begin() -> dict[str, float]:
    """Seconds of each beginning, in this process."""
    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        seconds[name] = time.perf_counter() - last
        last = time.perf_counter()

    import torch

    lap("import torch")
    import gpipe

    lap("import gpipe")
    gpipe.GPipe  # noqa: B018  # resolved on first use
    lap("gpipe.GPipe")
    layers = [[torch.nn.Linear(8, 8) for _ in range(LAYERS)] for _ in range(3)]
    sample = torch.ones(MICRO_BATCHES, 8)
    lap("layers")
    pipe = gpipe.GPipe(layers[0], PARTITIONS, MICRO_BATCHES)
    lap("construct")
    _ = pipe.program
    lap("program")
    gpipe.GPipe(layers[1], PARTITIONS, MICRO_BATCHES)
    lap("construct again")
    gpipe.GPipe(layers[2], PARTITIONS, MICRO_BATCHES, sample=sample)
    lap("measured")
    return seconds


def profile() -> dict[str, float]:
    """Seconds in each part of a construction, by the profiler, which makes all of them longer."""
    import torch

    import gpipe

    layers = [torch.nn.Linear(8, 8) for _ in range(LAYERS)]
    profiler = cProfile.Profile()
    with profiler:
        _ = gpipe.GPipe(layers, PARTITIONS, MICRO_BATCHES).program
    return dict(_parts(pstats.Stats(profiler)))


def train() -> dict[str, float]:
    """When each beginning of a training was over; ends the process, since all the others end at the same place."""
    marks = {}

    def mark(name: str) -> None:
        marks[name] = time.time() - float(os.environ["BEGAN"])

    import torch  # noqa: F401

    mark("torch")
    from gpipe.cli.main import main as command
    from gpipe.recipes import digits
    from gpipe.recipes.loop import train_epoch

    prepare = digits.prepare

    def preparing(*args: Any, **named: Any) -> object:
        mark("met")
        return prepare(*args, **named)

    def first_step(pipe: Any, optimizer: Any, batches: Any, rates: Any, *others: Any) -> None:
        mark("built")
        train_epoch(pipe, optimizer, islice(batches, 1), rates[:1], others[0])
        mark("step")
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(marks))
        raise SystemExit

    vars(digits).update(prepare=preparing, train_epoch=first_step)
    command(["train", "digits", "--out", os.environ["OUT"]])
    return marks


def first_step(processes: int, folder: str) -> dict[str, float]:
    """The marks of a training in so many processes; 0 is one process, without torchrun."""
    environment = {**os.environ, "BEGAN": str(time.time()), "OUT": folder, "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes else []
    command = [sys.executable, *launcher, "-m", "bench.startup", "--inside", "train"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, float] = json.loads(line)
    return found


def _parts(stats: pstats.Stats) -> Iterator[tuple[str, float]]:
    for (file, _, name), (_, _, _, cumulative, _) in stats.stats.items():  # type: ignore[attr-defined]
        known = f"{Path(file).stem}.{name}"
        if "gpipe" in Path(file).parts and known in PARTS:
            yield known, cumulative


def fresh(what: str, folder: str) -> dict[str, float]:
    """What a function of this module gives in a new process."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "bench.startup", "--inside", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    inside = {"begin": begin, "profile": profile, "train": train}
    parser.add_argument("--inside", choices=inside, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(inside[options.inside]()))
        return
    with TemporaryDirectory() as folder:
        fresh("begin", folder)
        rounds = [fresh("begin", folder) for _ in range(options.rounds)]
        parts = fresh("profile", folder)
        trainings = [{n: first_step(n, folder) for n in PROCESSES} for _ in range((options.rounds + 1) // 2)]
    report(rounds, parts, trainings)


def report(
    rounds: list[dict[str, float]], parts: dict[str, float], trainings: list[dict[int, dict[str, float]]]
) -> None:
    """Writes and prints what was found."""
    about = facts()
    laps = [[title, spread([one[name] for one in rounds])] for name, title in TITLES.items()]
    shares = [[title, f"{1e3 * parts.get(name, 0):.1f}"] for name, title in PARTS.items()]
    text = (
        f"# Beginnings\n\n{describe(about)}\n\n{len(rounds)} fresh processes; {LAYERS} layers, K={PARTITIONS}, "
        f"M={MICRO_BATCHES}. Wanted: `import gpipe` under 10 ms, construction under 1 s.\n\n"
        f"{table(['', 'ms (min-max)'], laps)}\n\nWhere construction and program spend it, by the profiler, which "
        f"makes all of it longer:\n\n{table(['', 'ms'], shares)}\n\nA training (`gpipe train digits`), "
        f"{len(trainings)} times: seconds after the command was given (min-max). Wanted: under 6 s.\n\n"
        f"{table(['', 'one process', *(f'torchrun, {n} processes' for n in PROCESSES if n)], _training(trainings))}"
    )
    medians = {name: median(one[name] for one in rounds) for name in rounds[0]}
    found = {"facts": about, "medians": medians, "rounds": rounds, "profile": parts, "trainings": trainings}
    write("startup", text, found)


def _training(trainings: list[dict[int, dict[str, float]]]) -> list[list[str]]:
    """A row for each mark, a column for each number of processes."""
    rows = []
    for mark, title in TRAINING.items():
        every = [[one[n][mark] for one in trainings] for n in PROCESSES]
        rows.append([title, *(f"{median(times):.1f} ({min(times):.1f}-{max(times):.1f})" for times in every)])
    return rows


if __name__ == "__main__":
    main()
