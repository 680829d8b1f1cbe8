"""Compares the schedules of several runtimes with the reference loop: `python -m bench.schedules WORKLOAD`.

Runtimes with the same placement of stages take turns, together with the reference loop and independent copies of it.
The placements are one stage per rank, two in a loop, two in a V, and the placement of the search, if nothing is
recomputed. Ratios are of turns in the same round. The bound of a schedule is its simulated time with the measured
stages. A split backward pass counts as two halves, and a recomputation as one forward pass.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from torch import Tensor

from bench.machine import facts
from bench.report import describe, interval, table, write
from bench.run import QUIET, ROUNDS, compare, gradients_newest_first, setup_for, stage_times
from bench.runtimes import FAMILIES, RUNTIMES, Family
from bench.teams import Teams, Turn, quietest, quietest_pairs, reason
from bench.workloads import WORKLOADS, Workload
from gpipe.schedule.cost import StageCost
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import simulate

WORKS = ("transformer", "halves", "conv", "amoebanet")
LOOPS = ("plain", "whole-1", "copies")
HEADER = (
    "runtime", "step ms (95 %)", "speed (95 %)", "of its bound", "threads / it (95 %)", "processes / it (95 %)",
    "peak MiB of one", "of all", "gradients",
)  # fmt: skip


@dataclass
class Row:
    """The results of one runtime: a turn per round, or the reason why there is none."""

    name: str
    turns: list[Turn]
    peak_bytes: list[int]
    gradients: str
    failure: str = ""
    bound: float = 0.0
    """How many times as fast as the plain loop its table is, were there nothing but stages; 0: none of ours."""

    @property
    def title(self) -> str:
        """Returns the name in tables."""
        return f"{len(self.peak_bytes)} plain loops at once" if self.name == "copies" else RUNTIMES[self.name].title

    @property
    def mini_batches(self) -> int:
        """Returns the number of mini-batches in a step."""
        return len(self.peak_bytes) if self.name == "copies" else 1


@dataclass
class Group:
    """Runtimes that took turns: those of one family of schedules, and the loops.

    Attributes:
        rounds: The least number of turns whose quietest count.
        forward: Seconds of each stage for a micro-batch, one after another in one thread.
        backward: Likewise.
    """

    title: str
    rounds: int
    cuts: tuple[int, ...]
    forward: list[float]
    backward: list[float]
    rows: list[Row] = field(default_factory=list)

    def markdown(self) -> str:
        """Returns the table with notes on how to read it."""
        stages = " ".join(f"{f * 1e3:.3g}/{b * 1e3:.3g}" for f, b in zip(self.forward, self.backward, strict=True))
        others = [median(turn.others for turn in self._quiet(row)) for row in self.rows if row.turns]
        return (
            f"**{self.title}**, layers {'+'.join(map(str, self.cuts))}; forward/backward of a micro-batch, ms, by "
            f"stage: {stages}. Other processes used up to {max(others):.2f} cores.\n\n"
            f"{table(HEADER, [self._line(row) for row in self.rows])}\n"
        )

    def _line(self, row: Row) -> list[str]:
        if not row.turns:
            why = reason(row.failure).replace("|", "/")
            return [row.title, f"failed: {why[:200]}", *["-"] * (len(HEADER) - 2)]
        plain = self.rows[0]
        return [
            row.title,
            _with_interval([1e3 * median(turn.seconds) for turn in self._quiet(row)]),
            _with_interval([row.mini_batches * ratio for ratio in self._ratios(plain, row)]),
            self._of_bound(row),
            *(self._ours_over(row, where) for where in ("threads", "processes")),
            f"{max(row.peak_bytes) / 2**20:.0f}",
            f"{sum(row.peak_bytes) / 2**20:.0f}",
            row.gradients,
        ]

    def _of_bound(self, row: Row) -> str:
        """Returns the speed relative to its bound, or to independent copies, whichever is less."""
        if not row.bound:
            return ""
        plain, copies = self.rows[0], next(each for each in self.rows if each.name == "copies")
        at_once = copies.mini_batches * median(self._ratios(plain, copies))
        return f"{median(self._ratios(plain, row)) / min(row.bound, at_once):.0%}"

    def _ours_over(self, peer: Row, where: str) -> str:
        """Returns the time of gpipe relative to a peer with the same schedule, or nothing without such a peer."""
        if peer.name in LOOPS or RUNTIMES[peer.name].ours:
            return ""
        same = f"{where}-{RUNTIMES[peer.name].schedule}"
        ours = next((row for row in self.rows if row.name == same and row.turns), None)
        return _with_interval(self._ratios(ours, peer)) if ours else "-"

    def _quiet(self, row: Row) -> list[Turn]:
        return quietest(row.turns, self.rounds, QUIET)

    def _ratios(self, of: Row, over: Row) -> list[float]:
        pairs = quietest_pairs(of.turns, over.turns, self.rounds, QUIET)
        return [median(a.seconds) / median(b.seconds) for a, b in pairs]


def _with_interval(values: Sequence[float]) -> str:
    low, high = interval(values)
    return f"{median(values):.4g} ({low:.4g}-{high:.4g})"


def runtimes_of(family: Family, only: Sequence[str]) -> list[str]:
    """Returns the runtimes of each schedule of a family, gpipe first, filtered by these names or schedules."""
    return [
        name
        for schedule in family.schedules
        for name, entry in sorted(RUNTIMES.items(), key=lambda item: not item[1].ours)
        if entry.schedule == schedule and (not only or name in only or schedule in only)
    ]


def bound(program: Program | None, forward: Sequence[float], backward: Sequence[float]) -> float:
    """Returns the simulated speed of a schedule relative to the reference loop, from the stage times."""
    if program is None or program.stages != len(forward):
        return 0.0
    costs = [StageCost(*each) for each in zip(forward, backward, strict=True)]
    work = program.micro_batches * sum((*forward, *backward))
    return work / simulate(program, costs).timeline.seconds


def measure(
    work: Workload, family: Family, names: Sequence[str], newest: dict[str, Tensor], *, remat: bool, rounds: int,
    seconds: float, rest: float,
) -> Group:  # fmt: skip
    """Measures the runtimes of a family in turns for about this number of seconds."""
    until = time.monotonic() + seconds
    setups = {name: setup_for(work, name, remat=remat) for name in ("plain", "whole-1", *names)}
    setups["stages"] = setups[names[0]]
    with Teams(setups, copies=min(work.partitions, os.cpu_count() or 1)) as teams:
        gradients = teams.gradients()
        teams.run(rounds, until, rest)
    forward, backward = stage_times(quietest(teams.turns["stages"], rounds, QUIET))
    same = {name: compare(found, gradients["plain"], newest) for name, found in gradients.items()}
    rows = [
        Row(
            name, turns, teams.by_name[name].peaks, same.get(name, ""), teams.failures.get(name, ""),
            bound(teams.by_name[name].program, forward, backward),
        )
        for name in (*LOOPS, *names)
        for turns in [[] if name in teams.failures else teams.turns[name]]
    ]  # fmt: skip
    return Group(family.title, rounds, setups["stages"].cuts, forward, backward, rows)


def groups(work: Workload, options: argparse.Namespace) -> Iterator[Group]:
    """Measures family after family. The time of each is proportional to its number of runtimes."""
    only = options.only.split(",") if options.only else []
    families = [family for family in FAMILIES if not (options.remat and "auto" in family.schedules)]
    names = {family: runtimes_of(family, only) for family in families}
    many = {family: len(LOOPS) + 1 + len(found) for family, found in names.items() if found}
    newest = gradients_newest_first(setup_for(work, "newest", remat=False))
    for family, turns in many.items():
        seconds = 60 * options.minutes * turns / sum(many.values())
        yield measure(
            work, family, names[family], newest, remat=options.remat, rounds=options.rounds, seconds=seconds,
            rest=options.rest,
        )  # fmt: skip


def main() -> None:
    known = [name for family in FAMILIES for name in (*family.schedules, *runtimes_of(family, []))]
    parser = argparse.ArgumentParser(prog="python -m bench.schedules", description=__doc__)
    parser.add_argument("workload", choices=WORKS)
    parser.add_argument("--remat", action="store_true", help="recompute every micro-batch, the loops excepted")
    parser.add_argument("--only", default="", help=f"schedules or runtimes, by commas, of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns for each runtime, at least")
    parser.add_argument("--minutes", type=float, default=10, help="for all, about")
    parser.add_argument("--rest", type=float, default=0, help="pause after a turn, in turns; for shared machines")
    parser.add_argument("--keep", default="", help="write the result under another name")
    options = parser.parse_args()
    if unknown := set(filter(None, options.only.split(","))) - set(known):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    work, about, found = WORKLOADS[options.workload], facts(), list[Group]()
    name = f"schedules-{work.name}" + ("-remat" if options.remat else "")
    title = f"{work.title}: schedules, {'with' if options.remat else 'without'} remat"
    heading = f"# {title}\n\n{describe(about)}\n\nK={work.partitions}, M={work.micro_batches}."
    for group in groups(work, options):
        found.append(group)
        print(group.markdown(), flush=True)
        text = "\n\n".join([heading, *(group.markdown() for group in found)])
        write(options.keep or name, text, {"facts": about, "groups": [asdict(group) for group in found]}, aloud=False)


if __name__ == "__main__":
    main()
