"""Runs configurations, kind after kind in turn, and writes the table.

python -m tests.soak.run --configurations 6000 --seed 0 --minutes 20 --out results
python -m tests.soak.run --only s1_tensor_hook --seed 17 -v
"""

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

from tests.support.kinds import KINDS
from tests.support.kinds.case import Kind

from .judge import FAILED, VERDICTS, Verdict
from .results import describe, facts, write
from .worker import Worker


def main(arguments: Sequence[str] | None = None) -> int:
    options = read(arguments)
    if options.list:
        print("\n".join(f"{kind.row or '-':12} {kind.name}" for kind in KINDS.values()))
        return 0
    chosen = [kind for kind in KINDS.values() if not options.only or matches(kind, options.only)]
    if not chosen:
        print(f"no kind is called {options.only}; --list shows them", file=sys.stderr)
        return 2
    verdicts = soak(chosen, options)
    print(table(verdicts))
    if options.out:
        keep(Path(options.out), verdicts)
    return int(any(verdict.verdict in FAILED for verdict in verdicts))


def read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, help="how many; one with --only, else one of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first configuration of each kind")
    parser.add_argument("--minutes", type=float, default=20, help="after which no new one is begun")
    parser.add_argument("--only", nargs="+", default=[], help="kinds, rows (S1), or beginnings of them with a star")
    parser.add_argument("--limit", type=float, default=60, help="seconds until a configuration counts as hanging")
    parser.add_argument("--workers", type=int, default=1, help="processes that judge at a time")
    parser.add_argument("--out", help="where to write the table: this name with .md and .json")
    parser.add_argument("--list", action="store_true", help="shows the kinds")
    parser.add_argument("-v", "--verbose", action="store_true", help="shows every verdict with its reason")
    return parser.parse_args(arguments)


def matches(kind: Kind, words: Sequence[str]) -> bool:
    """Whether a kind is meant by one of the words."""
    return any(
        word in (kind.name, kind.row) or (word.endswith("*") and kind.name.startswith(word[:-1])) for word in words
    )


def sequence(kinds: Sequence[Kind], seed: int) -> Iterator[tuple[str, int]]:
    for number in count(seed):
        for kind in kinds:
            yield kind.name, number


def soak(kinds: Sequence[Kind], options: argparse.Namespace) -> list[Verdict]:
    wanted = options.configurations or len(kinds)
    order, verdicts, lock = sequence(kinds, options.seed), list[Verdict](), threading.Lock()
    taken, deadline = 0, time.monotonic() + 60 * options.minutes

    def work() -> None:
        nonlocal taken
        worker = Worker(options.limit)
        while True:
            with lock:
                if taken >= wanted or time.monotonic() > deadline:
                    break
                taken += 1
                name, number = next(order)
            verdict = worker.judge(name, number)
            with lock:
                verdicts.append(verdict)
                show(verdict, options.verbose)
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts


def show(verdict: Verdict, verbose: bool) -> None:
    if verbose or verdict.verdict in FAILED:
        print(f"{verdict.verdict:10} --only {verdict.kind} --seed {verdict.number}   {verdict.setting}", flush=True)
        lines = verdict.why.splitlines()
        print("".join(f"    {line}\n" for line in (lines if verbose else lines[:2])), end="", flush=True)


def table(verdicts: Sequence[Verdict]) -> str:
    """Counts by kind and by row, in Markdown, with the numbers of what failed."""
    lines = [f"| row | kind | n | {' | '.join(VERDICTS)} | failed |", "|" + "---|" * (len(VERDICTS) + 4)]
    for kind in KINDS.values():
        own = [verdict for verdict in verdicts if verdict.kind == kind.name]
        if own:
            failed = [f"{v.verdict[:2]} {v.number}" for v in own if v.verdict in FAILED]
            lines.append(f"| {kind.row} | {kind.name} | {len(own)} | {_counts(own)} | {', '.join(failed[:8])} |")
    for row in sorted({kind.row for kind in KINDS.values()} - {""}):
        own = [verdict for verdict in verdicts if verdict.kind in KINDS and KINDS[verdict.kind].row == row]
        if own:
            lines.append(f"| {row} | all of {row} | {len(own)} | {_counts(own)} | |")
    lines.append(f"| | all | {len(verdicts)} | {_counts(verdicts)} | |")
    return "\n".join(lines)


def _counts(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdict.verdict for verdict in verdicts)
    return " | ".join(str(counts[name] or "") for name in VERDICTS)


def keep(path: Path, verdicts: Sequence[Verdict]) -> None:
    """The table, and all that failed in full, with where and how it was made."""
    about = facts()
    kept = [
        asdict(v) if v.verdict in FAILED else {"kind": v.kind, "number": v.number, "verdict": v.verdict}
        for v in verdicts
    ]
    write(path, f"# Soak\n\n{describe(about)}\n\n{table(verdicts)}", {"facts": about, "verdicts": kept})


if __name__ == "__main__":
    sys.exit(main())
