"""Faults on purpose, one at a time: how soon does every rank know, what is it told, and does anything go on wrong?

Each case of the matrix (kind of fault x phase x rank) trains a small model over as many processes as it has stages.
Exceptions are caught on every rank, the step is done again, and the numbers in the end are compared with those of
training without a pipeline. See `tests/support/processes/matrix.py` for what is judged, and how.

    python -m tests.soak.faults                                     # half an hour
    python -m tests.soak.faults --runtimes gpipe torch --ranks all  # an hour: torch's own pipeline too, every rank
    python -m tests.soak.faults --parts faults --kinds SIGKILL nan --partitions 2

By default each kind of fault happens on the ranks in turn: with two partitions once in each phase, and with four,
where processes take twice as long to start, in every second phase. Beside these it counts workers that outlive
torchrun, has faults happen while a pipe is made (`construction`), and runs `resume` and `damage`. What is found is
kept after every fault; the order is drawn, so that a run cut short has seen some of everything.
"""

import argparse
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.processes.faults import KINDS, PHASES
from tests.support.processes.launch import Crew
from tests.support.processes.matrix import Case, Finding, cases, run, shortfalls
from tests.support.processes.torchrun import torchrun, wait_for

from . import construction, damage, resume
from .results import RESULTS, describe, facts, of, table, with_time_left, write

PATIENCE = 30.0
"""Seconds beyond the timeout after which ranks hang."""
WAIT = 5.0
"""Seconds after the launcher's death at which a worker that still runs is an orphan."""
LATE = 2.0
"""Seconds in which every rank of one host has to know, beyond the timeout if a rank stands still."""
PARTS = ("faults", "construction", "orphans", "resume", "damage")
ELSEWHERE = {
    "resume": ("resumes that differ from the run that was never killed", resume.count),
    "damage": ("damaged checkpoints that were loaded", damage.count),
}
"""Figures of other modules: how many, of how many; they keep results of their own."""


@dataclass(frozen=True)
class Result:
    """A case and what every rank made of it."""

    case: Case
    findings: Sequence[Finding]

    def seconds(self, timeout: float) -> list[float]:
        """Until each rank that must raise had, beyond the timeout if only that could tell."""
        due = [one for one in self.findings if one.rank in self.case.must_raise]
        return [one.seconds - timeout * self.case.stalls for one in due if one.seconds is not None]


def share(results: Iterable[Result]) -> tuple[int, int]:
    """The (fault, rank) pairs whose message names all that it must, and all pairs in which there must be one."""
    pairs = [one for result in results for one in result.findings if one.rank in result.case.must_raise]
    return sum(not one.missing for one in pairs), len(pairs)


def worst(results: Iterable[Result], timeout: float) -> str:
    """The most seconds until all ranks of a case had raised."""
    known = [seconds for result in results for seconds in result.seconds(timeout)]
    return f"{max(known):.2f}" if known else "-"


def percent(count: int, total: int) -> str:
    """A share, with the numbers that it is made of."""
    return f"{100 * count / total:.1f} % ({of(count, total)})" if total else "-"


def count_orphans(runtime: str, worlds: Sequence[int]) -> tuple[int, int]:
    """Workers that outlive their launcher, whether they compute or one is stuck; and how many there were."""
    found = total = 0
    for world in worlds:
        for stuck in (-1, 0, world - 1):
            with TemporaryDirectory() as name:
                folder, args = Path(name), (name, runtime, str(stuck))
                with torchrun(world, "tests.support.jobs.worker", *args, folder=folder) as launched:
                    wait_for(launched, [folder / f"ready_{rank}" for rank in range(world)], limit=90)
                    total += world
                    found += len(launched.orphans(WAIT))
    return found, total


@dataclass
class Found:
    """All that is known so far.

    Attributes:
        about: Where the figures come from.
        due: How many faults there shall be, of each runtime.
        results: What came of those that there were.
        orphans: Workers that outlived their launcher, of how many.
        struck: What came of faults while a pipe was made.
        late: Workers that outlived a launcher that was killed before they made a pipe, of how many.
        elsewhere: Figures of other modules, by title.
    """

    about: dict[str, str] = field(default_factory=facts)
    due: dict[str, int] = field(default_factory=dict)
    results: dict[str, list[Result]] = field(default_factory=dict)
    orphans: dict[str, tuple[int, int]] = field(default_factory=dict)
    struck: list[construction.Struck] = field(default_factory=list)
    late: tuple[int, int] = (0, 0)
    elsewhere: dict[str, str] = field(default_factory=dict)


def figures(results: Sequence[Result], orphans: tuple[int, int], timeout: float) -> dict[str, str]:
    """The figures of one runtime, by title."""
    still = [result for result in results if result.case.stalls]
    others = [result for result in results if not result.case.stalls]
    inside = [result for result in results if result.case.fault.phase not in {"optimizer", "between"}]
    every = [one for result in results for one in result.findings]
    return {
        "faults": str(len(results)),
        "worst seconds until every rank has raised": worst(others, timeout),
        f"the same, beyond the timeout of {timeout:g} s, where a rank stands still": worst(still, timeout),
        "(fault, rank) pairs whose message names rank, stage, layer, micro-batch, phase and exception": percent(
            *share(inside)
        ),
        "pairs told of a fault outside of steps, in which the rank is named": percent(
            *share(result for result in results if result not in inside)
        ),
        "ranks that hang": of(sum(one.hung for one in every), len(every)),
        "ranks with wrong numbers and no word": of(sum(one.wrong for one in every), len(every)),
        "ranks that end with exit code 0 after another's fault": of(sum(one.contented for one in every), len(every)),
        f"orphans {WAIT:g} s after the launcher was killed": of(*orphans),
    }


LEGEND = (
    "Worst seconds until every rank had raised (beyond the timeout where one stands still), and how many of the "
    "ranks that must raise were told all. *No word*: without a pipeline nothing would be said either."
)
COMPLAINTS = 20
TARGETS = ["", f"<= {LATE:g}", f"<= {LATE:g}", "100 %", "100 %", "0", "0", "0", "0"]


def by_kind(results: Sequence[Result], timeout: float) -> str:
    """A table of worst seconds and of complete messages, a row for each kind of fault, a column for each phase."""
    rows = []
    seen = {result.case.fault.kind for result in results}
    for kind in filter(seen.__contains__, KINDS):
        row = [kind]
        for phase in PHASES:
            some = [one for one in results if (one.case.fault.kind, one.case.fault.phase) == (kind, phase)]
            told, due = share(some)
            row.append(f"{worst(some, timeout)} s, {told} of {due}" if due else "no word" if some else "")
        rows.append(row)
    return table(["", *PHASES], rows)


def complaints(results: Sequence[Result], timeout: float) -> str:
    """What fell short, in words: at most so much of each message that one sees what it is."""
    lines = []
    for result in results:
        late = max(result.seconds(timeout), default=0.0)
        found = [*shortfalls(result.findings), *([f"the last rank knew after {late:.2f} s"] if late > LATE else [])]
        lines += [f"- {result.case}: {what.replace(chr(10), ' ')[:300]}" for what in found]
    more = [f"- and {len(lines) - COMPLAINTS} more"] if len(lines) > COMPLAINTS else []
    return "\n".join([*lines[:COMPLAINTS], *more]) or "Nothing."


def choose(options: argparse.Namespace, runtime: str) -> list[Case]:
    """The faults that shall be, in an order that is drawn."""
    due: list[Case] = []
    for at, world in enumerate(options.partitions, 1):
        ranks = sorted({0, world - 1}) if options.ranks == "ends" else range(world)
        phases = [phase for phase in options.phases if runtime == "gpipe" or phase != "recompute"]
        every = list(cases(world, options.kinds, phases, ranks))
        due += in_turn(every, at) if options.ranks == "turns" else every
    random.Random(0).shuffle(due)
    return due


def in_turn(every: Iterable[Case], each: int) -> Iterator[Case]:
    """One case of each phase and kind, on the ranks in turn; of these one of each so many, others in each phase."""
    for phase_at, (_, of_phase) in enumerate(groupby(every, lambda case: case.fault.phase)):
        for kind_at, (_, of_kind) in enumerate(groupby(of_phase, lambda case: case.fault.kind)):
            ranks, turn = list(of_kind), phase_at + kind_at
            if turn % each == 0:
                yield ranks[turn // each % len(ranks)]


def collect(options: argparse.Namespace, runtime: str, found: Found) -> None:
    """Has every fault happen."""
    due = choose(options, runtime)
    found.due[runtime], results = len(due), found.results[runtime]
    with Crew(max(options.partitions)) as crew:
        for case in with_time_left(due, f"faults, {runtime}"):
            limit = options.timeout + PATIENCE
            findings = run(case, crew, runtime=runtime, timeout=options.timeout, limit=limit)
            results.append(Result(case, findings))
            report(options, found)


def read_options() -> argparse.Namespace:
    usage = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.soak.faults", description=__doc__, formatter_class=usage)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="what is measured; by default all")
    parser.add_argument("--runtimes", nargs="+", default=["gpipe"], choices=["gpipe", "torch"])
    parser.add_argument("--partitions", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument(
        "--ranks", default="turns", choices=["turns", "ends", "all"],
        help="where each kind of fault happens in each phase: on one, in turn (for the second of --partitions in "
        "every second phase, and so on); on the first and the last; on all",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=3.0, help="of the process group, in seconds")
    parser.add_argument("--name", default="faults", help="of the result")
    return parser.parse_args()


def main() -> None:
    logging.getLogger("gpipe").setLevel(logging.ERROR)
    options, found = read_options(), Found()
    for runtime in options.runtimes:
        found.results[runtime], found.orphans[runtime] = [], (0, 0)
    for runtime in options.runtimes:
        if "faults" in options.parts:
            collect(options, runtime, found)
        if "orphans" in options.parts:
            found.orphans[runtime] = count_orphans(runtime, options.partitions)
            report(options, found)
    if "construction" in options.parts:
        for struck in construction.strike_all(options.partitions):
            found.struck.append(struck)
            report(options, found)
        found.late = construction.late_orphans(options.partitions, WAIT)
        report(options, found)
    for part, (title, count) in ELSEWHERE.items():
        if part in options.parts:
            found.elsewhere[title] = of(*count())
            report(options, found)
    report(options, found, aloud=True)


def report(options: argparse.Namespace, found: Found, *, aloud: bool = False) -> None:
    """Keeps what is known so far."""
    columns = {
        runtime: figures(results, found.orphans[runtime], options.timeout)
        for runtime, results in found.results.items()
    }
    made = construction.figures(found.struck, found.late) if found.struck else {}
    partitions = ", ".join(map(str, options.partitions))
    text = f"# Faults\n\n{describe(found.about)}\n\nK = {partitions}; {__doc__.splitlines()[0]}\n"
    for runtime, due in found.due.items():
        if len(found.results[runtime]) < due:
            text += f"\nCut short: {of(len(found.results[runtime]), due)} faults of {runtime}.\n"
    text += f"\n{table(['', 'wanted', *columns], lines(columns, made, found.elsewhere))}\n{sections(options, found)}"
    data: dict[str, Any] = {"facts": found.about, "figures": columns, "elsewhere": found.elsewhere}
    data["cases"] = {runtime: [asdict(result) for result in results] for runtime, results in found.results.items()}
    data["construction"] = {"figures": made, "cases": [asdict(struck) for struck in found.struck]}
    write(RESULTS / options.name, text, data)
    if aloud:
        print(text)


def lines(
    columns: Mapping[str, Mapping[str, str]], made: Mapping[str, str], elsewhere: Mapping[str, str]
) -> Iterator[list[str]]:
    """All figures beside what is wanted: of each runtime, and of gpipe alone."""
    alone = [""] * (len(columns) - 1)
    for title, target in zip(next(iter(columns.values())), TARGETS, strict=True):
        yield [title, target, *(column[title] for column in columns.values())]
    for title, target in zip(made, ["", f"<= {LATE:g}", "all", "0", "0"], strict=False):
        yield [title, target, made[title], *alone]
    for title, figure in elsewhere.items():
        yield [title, "0", figure, *alone]


def sections(options: argparse.Namespace, found: Found) -> str:
    """What each kind of fault came to, and what falls short."""
    text = ""
    for runtime, results in found.results.items():
        text += f"\n## {runtime}\n\n{LEGEND}\n\n{by_kind(results, options.timeout)}\n\nWhat falls short:\n\n"
        text += f"{complaints(results, options.timeout)}\n"
    if found.struck:
        text += f"\n## While a pipe is made\n\n{construction.LEGEND}\n\n{construction.by_kind(found.struck)}\n"
    return text


if __name__ == "__main__":
    main()
