"""Compares the time of a step in two checkouts, such as before and after a change.

    git worktree add ../before 3ebf3c1
    python -m bench.beside ../before
    python -m bench.beside ../before --work conv amoebanet --remat always --seconds 60

Processes of both checkouts take turns in one run. Both run the benchmark code of this checkout, with different gpipe
packages, and use only public names of gpipe. A change is the median ratio of the pairs. If its interval includes
zero, there is no measurable change. On a loaded machine, compare the CPU time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile, mkdtemp
from typing import Any

import torch
import torch.distributed as dist

import gpipe
from bench.machine import facts
from bench.report import describe, interval, spread, table, write
from bench.workloads import WORKLOADS, Workload, sleeping

NONE = subprocess.DEVNULL
HERE = Path(__file__).parents[1]
WORK = {**WORKLOADS, "sleeping 1 ms": sleeping(0.001)}
STEPS = {"transformer": 1, "conv": 1, "amoebanet": 1, "sleeping": 1, "sleeping 1 ms": 3, "tiny": 60}
"""How many steps of each make a turn."""
REMATS, WAYS, DRIVERS = ("never", "always"), ("step", "call"), ("threads", "lockstep", "process")
HEADER = [
    "work", "remat", "way", "driver", "before, ms a step (min-max)", "after", "change", "interval of 95 %",
    "of CPU time", "interval of 95 %",
]  # fmt: skip
Row = tuple[str, str, str, str]  # work, remat, way, driver
Turn = tuple[float, float]  # seconds of a step, and CPU seconds
Pair = tuple[Turn, Turn]  # before and after


def serve(name: str, remat: str, way: str, driver: str) -> None:
    """Prints which package is loaded, then runs as many steps as each input line requests and prints their times."""
    work, others = WORK[name], list[subprocess.Popen[bytes]]()
    torch.set_num_threads(1)
    if driver == "process":
        others = join_ranks(work.partitions)
    step = training(work, remat, way, driver)
    if not dist.is_initialized() or not dist.get_rank():
        print(json.dumps(str(Path(str(gpipe.__file__)).parent)), flush=True)
    try:
        while steps := next_turn():
            seconds, cpu = list[float](), time.process_time()
            for _ in range(steps):
                start = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - start)
            spent = torch.tensor((time.process_time() - cpu) / steps, dtype=torch.float64)
            if dist.is_initialized():
                dist.all_reduce(spent)
            if not dist.is_initialized() or not dist.get_rank():
                print(json.dumps([median(seconds), float(spent)]), flush=True)
    finally:
        for other in others:
            other.kill()


def next_turn() -> int:
    """Returns the number of steps that the first rank receives. 0 ends the process."""
    if not dist.is_initialized():
        return int(sys.stdin.readline() or 0)
    told = torch.tensor(0 if dist.get_rank() else int(sys.stdin.readline() or 0))
    dist.broadcast(told, 0)
    return int(told)


def join_ranks(world: int) -> list["subprocess.Popen[bytes]"]:
    """Makes this process one rank of several. The first rank starts the others."""
    others, rank = [], int(os.environ.get("RANK", "0"))
    if not rank:
        os.environ.update(MEETING=f"{mkdtemp()}/meeting", WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo", RANK="0")
        for other in range(1, world):
            variables = {**os.environ, "RANK": str(other), "LOCAL_RANK": str(other)}
            command = [sys.executable, "-m", "bench.beside", *sys.argv[1:]]
            others.append(
                subprocess.Popen(command, env=variables, stdin=NONE, stdout=NONE, stderr=NONE)
            )  # ends with the first, which it hears
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("gloo", f"file://{os.environ['MEETING']}", rank=rank, world_size=world)
    return others


def training(work: Workload, remat: str, way: str, driver: str) -> Callable[[], object]:
    """Returns a function that runs one step of a workload, by `pipe.step` or by `backward()` of a loss."""
    inputs, targets = work.data()
    cuts = work.cuts(work.partitions)
    pipe = gpipe.GPipe(
        work.layers(),
        work.partitions if cuts is None else cuts,
        work.micro_batches,
        remat=remat,
        seed=0,
        driver=driver,
    )

    def step() -> None:
        if way == "step":
            pipe.step(inputs, targets, loss_fn=work.loss_fn)
        else:
            work.loss_fn(pipe(inputs, gather=True), targets).backward()
        pipe.zero_grad(set_to_none=True)

    return step


class Process:
    """A process that trains with the gpipe package of one checkout, and the benchmark code of this checkout."""

    def __init__(self, checkout: Path, row: Row) -> None:
        self.errors = TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "bench.beside", "--serve", *row],
            cwd=HERE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(HERE)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        library = Path(self._hear())
        if not library.is_relative_to(checkout):
            self.close()
            raise RuntimeError(f"{library} came instead of the library of {checkout}: give a checkout with src/gpipe")

    def turn(self, steps: int) -> Turn:
        """Runs this number of steps, and returns their median duration and the CPU time of one step."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{steps}\n")
        self.popen.stdin.flush()
        seconds, cpu = self._hear()
        return seconds, cpu

    def close(self) -> None:
        """Ends the process."""
        self.popen.kill()
        self.popen.communicate()
        self.errors.close()

    def _hear(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f"the process has ended:\n{self.errors.read()[-3000:]}")
        return json.loads(line)


def measure(before: Path, row: Row, rounds: int, seconds: float) -> list[Pair]:
    """Runs both in pairs of turns. The order changes from pair to pair."""
    steps, until = STEPS[row[0]], time.monotonic() + seconds
    both: list[Process] = []
    try:
        both += [Process(before, row)]
        both += [Process(HERE, row)]
        for process in both:
            process.turn(2 + steps)
        pairs: list[Pair] = []
        while len(pairs) < rounds or time.monotonic() < until:
            order = (0, 1) if len(pairs) % 2 else (1, 0)
            found = {at: both[at].turn(steps) for at in order}
            pairs.append((found[0], found[1]))
        return pairs
    finally:
        for process in both:
            process.close()


def change(ratios: Sequence[float]) -> list[str]:
    """Returns the median change, and its interval by bootstrap."""
    low, high = interval(ratios)
    return [f"{median(ratios) - 1:+.1%}", f"{low - 1:+.1%} to {high - 1:+.1%}"]


def shown(row: Row, pairs: Sequence[Pair]) -> list[str]:
    """Returns a row of the table."""
    sides = (spread([turn[0] for turn in side]) for side in zip(*pairs, strict=True))
    wall, cpu = ([after[of] / before[of] for before, after in pairs] for of in (0, 1))
    return [*row, *sides, *change(wall), *change(cpu)]


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Returns the settings that the arguments select."""
    yield from product(options.work, options.remat, options.way, options.driver)


def read_options() -> argparse.Namespace:
    usage = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.beside", description=__doc__, formatter_class=usage)
    parser.add_argument("before", nargs="?", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of turns, at least")
    parser.add_argument("--seconds", type=float, default=20, help="for a row, about")
    parser.add_argument("--work", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--remat", nargs="+", choices=REMATS, default=REMATS)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--driver", nargs="+", choices=DRIVERS, default=DRIVERS[:1])
    parser.add_argument("--keep", default="beside", help="write the result under another name")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is None and options.before is None:
        parser.error("give the checkout to compare with")
    if options.before is not None:
        options.before = options.before.resolve()  # the processes run elsewhere
    return options


def main() -> None:
    options = read_options()
    if options.serve:
        serve(*options.serve)
        return
    commit = subprocess.check_output(["git", "-C", options.before, "rev-parse", "--short", "HEAD"], text=True).strip()
    about, lines, data = facts(), [], {}
    for row in rows(options):
        pairs = measure(options.before, row, options.rounds, options.seconds)
        lines.append(shown(row, pairs))
        data[" ".join(row)] = pairs
        print(*lines[-1], sep="  ", flush=True)
    text = f"# A step before and after, at {commit} and here\n\n{describe(about)}\n\n{table(HEADER, lines)}"
    write(options.keep, text, {"facts": about, "before": commit, "turns": data})


if __name__ == "__main__":
    main()
