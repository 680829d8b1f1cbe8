"""Shows where the time of a step goes that its schedule does not predict: `python -m bench.gap WORKLOAD`.

The durations in the prediction are from the same actions, run one after another. A second run executes all ranks at
the same time, and records wall time, CPU time and page faults of each cell.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import gpipe
from bench.machine import facts
from bench.report import describe, table, write
from bench.run import setup_for
from bench.setup import Setup
from bench.workloads import WORKLOADS
from gpipe.features.recorder import Recorder
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.feature import Work
from gpipe.runtime.run import Rank
from gpipe.runtime.run import Run as MiniBatch
from gpipe.schedule.action import COMPUTE, Action
from gpipe.schedule.cost import StageCost
from gpipe.schedule.simulate import simulate

Cells = Mapping[Action, tuple[float, ...]]
"""Of each action: seconds by the clock, of the user's and of the system's CPU time, and page faults."""


@dataclass(frozen=True)
class Run:
    """Measurements of one step: its wall time, its timeline and its cells."""

    step: float
    timeline: float
    cells: Cells


class Watch(Recorder):
    """A recorder that also reads the resources that the thread used in each action."""

    def __init__(self) -> None:
        super().__init__(keep=1)
        self.cells: dict[Action, tuple[float, ...]] = {}

    def perform(self, perform: Work, run: MiniBatch, rank: Rank, step: CompiledAction) -> None:
        """Runs an action of a rank between two measurements."""
        before, start = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter()
        super().perform(perform, run, rank, step)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_THREAD)
        self.cells[step.action] = (
            seconds,
            after.ru_utime - before.ru_utime,
            after.ru_stime - before.ru_stime,
            after.ru_minflt - before.ru_minflt,
        )


def watched(
    pipes: Sequence[gpipe.GPipe], setup: Setup, rounds: int, meet: Callable[[], object] = int
) -> list[list[Run]]:
    """Runs steps of pipes in turns. The first two steps of each are warm-up."""
    inputs, targets = setup.work.data()
    found: list[list[Run]] = [[] for _ in pipes]
    for _ in range(rounds + 2):
        for pipe, runs in zip(pipes, found, strict=True):
            given = inputs if pipe.reads_inputs else None, targets if pipe.reads_targets else None
            pipe.zero_grad()
            pipe.recorder = watch = Watch()
            meet()
            start = time.perf_counter()
            pipe.step(*given, setup.work.loss_fn)
            step = time.perf_counter() - start
            runs.append(Run(step, watch.runs[-1].timeline.seconds, watch.cells))
    return [runs[2:] for runs in found]


def make(setup: Setup, schedule: str, driver: str) -> gpipe.GPipe:
    """Builds the pipe of a workload."""
    remat = "always" if setup.remat else "never"
    return gpipe.GPipe(
        setup.work.layers(), setup.cuts, setup.micro_batches, remat=remat, seed=0, driver=driver, schedule=schedule
    )


def typical(runs: Sequence[Run]) -> Cells:
    """Returns the median of each measurement of each action."""
    return {
        action: tuple(median(run.cells[action][at] for run in runs) for at in range(4)) for action in runs[0].cells
    }


def foretold(pipe: gpipe.GPipe, alone: Cells) -> float:
    """Returns the duration of a step by the schedule if each action takes as long as it does alone."""
    costs = [StageCost(0.0, 0.0)] * pipe.program.stages
    timeline = simulate(pipe.program, costs, lambda action: alone[action][0] if action in alone else 0.0).timeline
    return timeline.seconds


def shares(pipe: gpipe.GPipe, alone: Cells, runs: Sequence[Run]) -> dict[str, float]:
    """Returns where the time of all ranks went in a typical step, as shares of the step."""
    ranks, plan = pipe.partitions, foretold(pipe, alone)
    middle = sorted(runs, key=lambda run: run.step)[len(runs) // 2]
    step, together = middle.step, middle.cells

    def more(reading: Callable[[tuple[float, ...]], float]) -> float:
        return sum(reading(together[action]) - reading(alone[action]) for action in alone if action.kind in COMPUTE)

    work = sum(cell[0] for action, cell in alone.items() if action.kind in COMPUTE)
    seconds = {
        "the actions, as long as alone": work,
        "idle by the table": ranks * plan - work,
        "in cells: off the core (interpreter's lock, other processes)": more(lambda c: c[0] - c[1] - c[2]),
        "in cells: more CPU time, the system's (page faults)": more(lambda c: c[2]),
        "in cells: more CPU time, the user's (memory, caches)": more(lambda c: c[1]),
        "before the first action and behind the last": ranks * (step - middle.timeline),
    }
    seconds["between cells: hand-over, and waiting for what is late"] = ranks * step - sum(seconds.values())
    return {name: value / (ranks * step) for name, value in seconds.items()} | {
        "plan / step": plan / step,
        "step, ms": step * 1e3,
        "page faults": sum(cell[3] for cell in together.values()),
        "page faults, alone": sum(cell[3] for cell in alone.values()),
    }


def in_threads(setup: Setup, schedule: str, rounds: int) -> tuple[Cells, dict[str, float]]:
    """Measures the actions alone, and in turns with a thread for each rank."""
    with make(setup, schedule, "lockstep") as one, make(setup, schedule, "threads") as pipe:
        first, runs = watched([one, pipe], setup, rounds)
        return typical(first), shares(pipe, typical(first), runs)


def _rank(
    rank: int, answers: Connection, setup: Setup, schedule: str, driver: str, rounds: int, meeting: str
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setup.partitions))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=setup.partitions)
    with make(setup, schedule, driver) as pipe:
        answers.send(watched([pipe], setup, rounds, dist.barrier)[0])


def at_once(setup: Setup, schedule: str, driver: str, rounds: int) -> list[list[Run]]:
    """Runs one process per rank. All begin their steps at the same time."""
    context, ours = get_context("spawn"), []
    with TemporaryDirectory() as folder:
        for rank in range(setup.partitions):
            own, theirs = context.Pipe()
            job = partial(_rank, rank, theirs, setup, schedule, driver, rounds, f"{folder}/meeting")
            context.Process(target=job, daemon=True).start()
            ours.append(own)
        return [connection.recv() for connection in ours]


def slowdown(setup: Setup, schedule: str, alone: Cells, rounds: int) -> float:
    """Returns how much longer actions take if each process runs all of them independently, all at the same time."""
    every = [typical(runs) for runs in at_once(setup, schedule, "lockstep", rounds)]
    took = median(sum(cell[0] for cell in cells.values()) for cells in every)
    return took / sum(cell[0] for cell in alone.values()) - 1


def over_processes(setup: Setup, schedule: str, alone: Cells, rounds: int) -> dict[str, float]:
    """Measures with one process per rank."""
    found = at_once(setup, schedule, "process", rounds)
    runs = [
        Run(
            max(run.step for run in every),
            max(run.timeline for run in every),
            {action: cell for run in every for action, cell in run.cells.items()},
        )
        for every in zip(*found, strict=True)
    ]
    return shares(make(setup, schedule, "lockstep"), alone, runs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gap", description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS), nargs="?", default="transformer")
    parser.add_argument("--schedules", default="gpipe,zb_v")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    work, about, found = WORKLOADS[options.workload], facts(), {}
    torch.set_num_threads(1)
    for schedule in options.schedules.split(","):
        setup = setup_for(work, f"threads-{schedule}", remat=options.remat)
        alone, threads = in_threads(setup, schedule, options.rounds)
        apart = {
            "actions slower where processes that share nothing do all at once": slowdown(
                setup, schedule, alone, options.rounds
            )
        }
        found[f"{schedule}, threads"] = threads | apart
        found[f"{schedule}, processes"] = over_processes(setup, schedule, alone, options.rounds) | apart
    names = list(next(iter(found.values())))
    lines = [[name, *(_shown(name, column[name]) for column in found.values())] for name in names]
    text = table(["share of the ranks' time", *found], lines)
    title = f"# {work.title}: from the table to the clock{', with remat' if options.remat else ''}"
    write(
        f"gap-{work.name}{'-remat' * options.remat}",
        f"{title}\n\n{describe(about)}\n\n{text}",
        {"facts": about, "found": found},
    )


def _shown(name: str, value: float) -> str:
    return f"{value:.0f}" if name.startswith(("step", "page")) else f"{value:.1%}"


if __name__ == "__main__":
    main()
