"""Compares the steps of gpipe and other runtimes by workload: `python -m bench.run [WORKLOAD ...]`."""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import torch
from torch import Tensor

from bench.ideal import makespan, share
from bench.machine import facts
from bench.report import describe, spread, table, write
from bench.runtimes import COMPARED, RUNTIMES
from bench.setup import Setup
from bench.teams import Team, Teams, Turn, quietest, reason
from bench.workloads import WORKLOADS, Workload
from gpipe.planner.search.balance import partition

ROUNDS = 5
QUIET = 0.1  # of a core
NOT_WITH_REMAT = {"whole", "naive", "torch-zbv"}
ONLY_WITH_REMAT = {"except_last"}
LONG = {
    "gpipe", "call", "except_last", "processes", "processes-call", "torch-gpipe", "torch-1f1b", "deepspeed",
    "torchgpipe",
}  # where steps take long  # fmt: skip


@dataclass
class Row:
    """The results of one runtime."""

    name: str
    seconds: list[float]
    cpu: float
    others: float
    peak_bytes: list[int]
    gradients: str


@dataclass
class Result:
    """The results of one workload with or without recomputation: all data of a table."""

    workload: str
    title: str
    partitions: int
    micro_batches: int
    remat: bool
    cuts: tuple[int, ...]
    forward: list[float]
    backward: list[float]
    ideal: float
    copies_slowdown: float
    ceiling: float
    rows: list[Row]
    failures: dict[str, str] = field(default_factory=dict)

    def markdown(self) -> str:
        """Returns the table with notes on how to read it."""
        plain = median(next(row for row in self.rows if row.name == "plain").seconds)
        header = [
            "runtime", "step ms (min-max of rounds)", "speed", "of ceiling", "x ideal", "us/cell", "CPU/wall",
            "peak MiB", "gradients",
        ]  # fmt: skip
        cells = self.partitions * self.micro_batches
        lines = []
        for row in self.rows:
            step = median(row.seconds)
            lines.append(
                [
                    RUNTIMES[row.name].title, spread(row.seconds), f"{plain / step:.2f}",
                    f"{plain / step / self.ceiling:.2f}", f"{step / self.ideal:.2f}", f"{step / cells * 1e6:.0f}",
                    f"{row.cpu:.2f}", _peak(row.peak_bytes), row.gradients,
                ]
            )  # fmt: skip
        failed = "".join(f"\n{RUNTIMES[name].title} failed: {reason(why)}\n" for name, why in self.failures.items())
        return f"{self._heading()}\n\n{table(header, lines)}\n{failed}"

    def _heading(self) -> str:
        stages = " ".join(f"{f * 1e3:.3g}/{b * 1e3:.3g}" for f, b in zip(self.forward, self.backward, strict=True))
        busiest = max(row.others for row in self.rows)
        return (
            f"**{'With' if self.remat else 'Without'} remat**, K={self.partitions}, M={self.micro_batches}, layers "
            f"{'+'.join(map(str, self.cuts))}; forward/backward of a micro-batch, ms, by stage: {stages}; ideal "
            f"{self.ideal * 1e3:.4g} ms.\nIndependent copies of the plain loop slow each other by "
            f"{self.copies_slowdown:.2f}; ceiling {self.ceiling:.2f}x the plain loop. Other processes used up to "
            f"{busiest:.2f} cores."
        )


def _peak(sizes: Sequence[int]) -> str:
    total = f"{sum(sizes) / 2**20:.0f}"
    return total if len(sizes) == 1 else f"{total} ({max(sizes) / 2**20:.0f})"


def choose_cuts(work: Workload, partitions: int) -> tuple[int, ...]:
    """Returns the predefined layers of each partition, or those with the fastest slowest partition as measured."""
    known = work.cuts(partitions)
    if known is not None:
        return known
    layers = len(work.layers())
    setup = Setup(work.name, layers, work.micro_batches, (1,) * layers, remat=False)
    team = Team("stages", setup)
    try:
        team.wait_until_ready()
        turns = [team.turn() for _ in range(3)]
    finally:
        team.close()
    forward, backward = stage_times(turns)
    return partition([f + b for f, b in zip(forward, backward, strict=True)], partitions, balance="minmax").layers


def stage_times(turns: Sequence[Turn]) -> tuple[list[float], list[float]]:
    """Returns the seconds of each stage per micro-batch: medians within a turn, then over turns."""

    def over(times: Sequence[Sequence[Sequence[float]]]) -> list[float]:
        return [median(median(turn[stage]) for turn in times) for stage in range(len(times[0]))]

    return over([turn.forwards for turn in turns]), over([turn.backwards for turn in turns])


def measure(
    work: Workload, names: Sequence[str], *, remat: bool, rounds: int, seconds: float, rest: float = 0.0
) -> Result:
    """Runs one workload with the runtimes for about this number of seconds."""
    until = time.monotonic() + seconds
    setups = {name: setup_for(work, name, remat=remat) for name in ("plain", "stages", *names)}
    copies = min(work.partitions, os.cpu_count() or 1)
    with Teams(setups, copies=0 if work.sleeps else copies) as teams:
        gradients = teams.gradients()
        gradients["newest"] = gradients_newest_first(setups["plain"])
        teams.run(rounds, until, rest)
    quiet = {name: quietest(turns, rounds, QUIET) for name, turns in teams.turns.items() if turns}
    steps = {name: [median(turn.seconds) for turn in turns] for name, turns in quiet.items()}
    forward, backward = stage_times(quiet["stages"])
    slowdown = 1.0 if work.sleeps else median(steps["copies"]) / median(steps["plain"])
    machines = work.partitions if work.sleeps else copies
    ceiling = machines / slowdown * share(forward, backward, work.micro_batches, remat=remat)
    same = {name: compare(found, gradients["plain"], gradients["newest"]) for name, found in gradients.items()}
    there = [name for name in ("plain", *names) if name not in teams.failures]
    rows = [_row(name, quiet[name], teams.by_name[name].peaks, same[name]) for name in there]
    return Result(
        work.name, work.title, work.partitions, work.micro_batches, remat, setups["plain"].cuts, forward, backward,
        makespan(forward, backward, work.micro_batches, remat=remat), slowdown, ceiling, rows,
        teams.failures,
    )  # fmt: skip


def _row(name: str, turns: Sequence[Turn], peaks: list[int], gradients: str) -> Row:
    seconds = [median(turn.seconds) for turn in turns]
    return Row(
        name, seconds, median(turn.cpu for turn in turns), median(turn.others for turn in turns), peaks, gradients
    )


_CUTS: dict[tuple[str, int], tuple[int, ...]] = {}


def setup_for(work: Workload, name: str, *, remat: bool) -> Setup:
    """Returns the setup of a runtime. All runtimes with the same number of stages use the same split points."""
    stages = work.partitions * RUNTIMES[name].stages_per_rank
    if (work.name, stages) not in _CUTS:
        _CUTS[work.name, stages] = choose_cuts(work, stages)
    return Setup(work.name, work.partitions, work.micro_batches, _CUTS[work.name, stages], remat=remat)


def gradients_newest_first(setup: Setup) -> dict[str, Tensor]:
    """Returns the gradients of the reference loop with micro-batches in reverse order."""
    team = Team("newest", setup)
    try:
        team.wait_until_ready()
        return team.gradients()
    finally:
        team.close()


def compare(found: Mapping[str, Tensor], plain: Mapping[str, Tensor], newest: Mapping[str, Tensor]) -> str:
    """Describes how gradients differ from those of the reference loop in either order."""
    if found.keys() != plain.keys():
        return "MISSING"
    for reference, word in ((plain, "="), (newest, "= (newest first)")):
        if all(torch.equal(found[name], reference[name]) for name in found):
            return word
    largest = max(float((found[n] - plain[n]).norm() / (plain[n].norm() + 1e-30)) for n in found)
    return f"{largest:.0e}"


def runtimes_for(work: Workload, *, remat: bool) -> list[str]:
    """Returns the runtimes in the table of this workload, besides the reference loop."""
    lacks = {"plain", "newest", "stages", "ddp"} | (NOT_WITH_REMAT if remat else ONLY_WITH_REMAT)
    return [name for name in COMPARED if name not in lacks and (name in LONG or not work.long)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    known = [name for name in WORKLOADS if name not in {"wide", "halves"}]  # those of slow_link and schedules
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--remat", choices=("off", "on", "both"), default="both")
    parser.add_argument("--runtimes", help=f"separated by commas, of {', '.join(RUNTIMES)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns for each runtime, at least")
    parser.add_argument("--minutes", type=float, default=4, help="for a workload, about")
    parser.add_argument("--rest", type=float, default=0, help="pause after a turn, in turns; for shared machines")
    parser.add_argument("--keep", default="", help="write the result under another name")
    options = parser.parse_args()
    remats = {"off": [False], "on": [True], "both": [False, True]}[options.remat]
    for name in options.workloads or known:
        work = WORKLOADS[name]
        results = []
        for remat in remats:
            names = options.runtimes.split(",") if options.runtimes else runtimes_for(work, remat=remat)
            seconds = 60 * options.minutes / len(remats)
            results.append(
                measure(work, names, remat=remat, rounds=options.rounds, seconds=seconds, rest=options.rest)
            )
        about = facts()
        text = f"# {work.title}\n\n{describe(about)}\n\n" + "\n".join(result.markdown() for result in results)
        write(options.keep or name, text, {"facts": about, "results": [asdict(result) for result in results]})


if __name__ == "__main__":
    main()
