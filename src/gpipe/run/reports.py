"""What a process tells the others of its failure, and the exception that they raise of it."""

import traceback
from collections.abc import Mapping
from typing import Any, TypeAlias

from gpipe.run.transport import RemoteError

Report: TypeAlias = Mapping[str, Any]
"""In words of JSON: the run, the rank that failed, its exception's type, message and traceback."""

LONGEST = 20_000  # characters of a traceback, and of an exception's text


def report_of(error: BaseException, run: int, rank: int) -> Report:
    """What to tell of an exception; one heard from another process is passed on, so that all tell of the same."""
    if isinstance(error, RemoteError) and error.heard:
        told = {"rank": error.rank, "type": error.type_name, "message": str(error), "traceback": error.traceback}
        return {"run": run, **told}
    said = "".join(traceback.format_exception_only(error)).strip()  # notes too, and nothing else raises
    return {
        "run": run,
        "rank": rank,
        "type": type(error).__name__,
        "message": f"rank {rank} failed: {_shortened(said)}",
        "traceback": "".join(traceback.format_exception(error))[-LONGEST:],
    }


def error_of(report: Report) -> RemoteError:
    """What to raise of a report."""
    return heard(report["message"], report["rank"], report["type"], report["traceback"])


def heard(message: str, rank: int, type_name: str = "", its_traceback: str = "") -> RemoteError:
    """The exception of a failure in another process."""
    error = RemoteError(message, rank, type_name, its_traceback)
    error.heard = True
    return error


def _shortened(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} [...] {text[-half:]}"
