"""What a process tells the others of its failure, what they raise of it, and where they last saw who says nothing."""

import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from gpipe.comm.status import Seen
from gpipe.errors import RemoteError, folded, heard

Report: TypeAlias = Mapping[str, Any]
"""In words of JSON: the run, the rank that failed, its exception's type, message and traceback."""

SILENCE = 2.5  # seconds after which a host that should answer every second counts as out of reach
LONG = 10.0  # seconds after which a wait is told of, once
SOON = 1.0  # seconds from the end of a process's connection until its own report of why, at most
LONGEST = 20_000  # characters of a traceback, and of an exception's text


def report_of(error: BaseException, run: int, rank: int, at: str = "") -> Report:
    """What to tell of an exception; one heard from another process is passed on, so that all tell of the same.

    `at` says in words when it was raised, if that is not in its notes.
    """
    if isinstance(error, RemoteError) and error.heard:
        told = {"rank": error.rank, "type": error.type_name, "message": str(error), "traceback": error.traceback}
        return {"run": run, **told}
    said = "".join(traceback.format_exception_only(error)).strip()  # notes too, and nothing else raises
    return {
        "run": run,
        "rank": rank,
        "type": type(error).__name__,
        "message": f"rank {rank} failed{at and f' {at}'}: {_shortened(said)}",
        "traceback": "".join(traceback.format_exception(type(error), error, folded(error)))[-LONGEST:],
    }


def error_of(report: Report) -> RemoteError:
    """What to raise of a report."""
    return heard(report["message"], report["rank"], report["type"], report["traceback"])


def last_seen(seen: Seen | None, silent: float, run: int, words: Callable[[Seen], str]) -> str:
    """Where another process was when last seen in this run; None if it is on another host, `silent` for so long."""
    if seen is None and silent > SILENCE:
        return f"it cannot be reached: its host has not answered for {silent:.1f} s"
    if seen is None:
        return "it is on another host: see its own messages"
    if seen.run < run or seen.at < 0:
        where = f"it was last seen outside of any step, after {seen.run} runs, while this is run {run}"
        return f"{where}: is the pipe called on every rank, in the same order?"
    return f"it was last seen {words(seen)}\n    and that for {time.monotonic() - seen.since:.1f} s"


def _shortened(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} [...] {text[-half:]}"
