"""Faults on purpose, one at a time: how soon does every rank know, what is it told, and does anything go on wrong?

Each case of the matrix (kind of fault x phase x rank) trains a small model over as many processes as it has stages.
Exceptions are caught on every rank, the step is done again, and the numbers in the end are compared with those of
training without a pipeline. See `tests/processes/matrix.py` for what is judged, and how.

    python -m bench.faults --partitions 2 4

All of it takes three quarters of an hour; `--runtimes gpipe --ranks ends` less than half of that.
"""

import argparse
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.progress import track

from bench.machine import facts
from bench.report import describe, table, write
from tests.processes.faults import KINDS, PHASES
from tests.processes.launch import Crew
from tests.processes.matrix import Case, Finding, cases, run, shortfalls
from tests.processes.torchrun import torchrun, wait_for

WAIT = 5.0
"""Seconds after the launcher's death at which a worker that still runs is an orphan."""
LATE = 2.0
"""Seconds in which every rank of one host has to know, beyond the timeout if a rank stands still."""
ELSEWHERE = {"resumes that differ": "bench.resume", "damaged checkpoints accepted": "bench.damage"}
"""Figures of other modules, each by a function `count() -> (how many, of how many)`; see `from_elsewhere`."""


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


def of(count: int, total: int) -> str:
    """So many of so many."""
    return f"{count} of {total}" if total else "-"


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
                with torchrun(world, "tests.processes.worker", *args, folder=folder) as launched:
                    wait_for(launched, [folder / f"ready_{rank}" for rank in range(world)], limit=90)
                    total += world
                    found += len(launched.orphans(WAIT))
    return found, total


def from_elsewhere() -> Iterator[tuple[str, str]]:
    """Figures that other modules count, where they are there."""
    for title, module in ELSEWHERE.items():
        found = find_spec(module) is not None
        yield title, of(*import_module(module).count()) if found else f"not measured: `{module}.count()` is missing"


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


def collect(options: argparse.Namespace, runtime: str) -> list[Result]:
    """Has every case happen."""
    due: list[Case] = []
    for world in options.partitions:
        ranks = range(world) if options.ranks == "all" else sorted({0, world - 1})
        phases = [phase for phase in options.phases if runtime == "gpipe" or phase != "recompute"]
        due += cases(world, options.kinds, phases, ranks)
    with Crew(max(options.partitions)) as crew:
        return [
            Result(case, run(case, crew, runtime=runtime, timeout=options.timeout))
            for case in track(due, description=runtime)
        ]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("--runtimes", nargs="+", default=["gpipe", "torch"], choices=["gpipe", "torch"])
    parser.add_argument("--partitions", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--ranks", default="all", choices=["all", "ends"], help="on which ranks faults happen")
    parser.add_argument("--timeout", type=float, default=3.0, help="of the process group, in seconds")
    parser.add_argument("--no-orphans", action="store_true", help="leave torchrun alone")
    parser.add_argument("--name", default="faults", help="of the result")
    return parser.parse_args()


def main() -> None:
    logging.getLogger("gpipe").setLevel(logging.ERROR)
    options = read_options()
    found = {runtime: collect(options, runtime) for runtime in options.runtimes}
    orphans = dict.fromkeys(found, (0, 0))
    if not options.no_orphans:
        orphans = {runtime: count_orphans(runtime, options.partitions) for runtime in found}
    report(options, found, orphans)


def report(options: argparse.Namespace, found: dict[str, list[Result]], orphans: dict[str, tuple[int, int]]) -> None:
    """Writes and prints what was found."""
    about = facts()
    columns = {runtime: figures(results, orphans[runtime], options.timeout) for runtime, results in found.items()}
    titles = next(iter(columns.values()))
    rows = [
        [title, target, *(column[title] for column in columns.values())]
        for title, target in zip(titles, TARGETS, strict=True)
    ]
    rows += [[title, "0", figure, *[""] * (len(columns) - 1)] for title, figure in from_elsewhere()]
    text = (
        f"# Faults\n\n{describe(about)}\n\nK = {', '.join(map(str, options.partitions))}; {__doc__.splitlines()[0]}"
    )
    text += f"\n\n{table(['', 'wanted', *columns], rows)}\n"
    for runtime, results in found.items():
        text += f"\n## {runtime}\n\n{LEGEND}\n\n{by_kind(results, options.timeout)}\n\nWhat falls short:\n\n"
        text += f"{complaints(results, options.timeout)}\n"
    data: dict[str, Any] = {"facts": about, "figures": columns}
    data["cases"] = {runtime: [asdict(result) for result in results] for runtime, results in found.items()}
    write(options.name, text, data)


if __name__ == "__main__":
    main()
