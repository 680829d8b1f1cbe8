"""How a job over processes ended, on each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank.

    Attributes:
        rank: Which.
        code: What the process ended with, a signal as its negative number; None if it lives, or was ended by us.
        hung: Whether it had to be ended, at the limit or because it was meant to be stuck.
        answered: Whether the job returned.
        answer: What it returned.
        error: The name of the type of what it raised; empty if it raised nothing.
        told: The text of what it raised, with its notes.
        text: The same with the whole traceback.
        marked: When any rank first said `mark()`, in seconds of `time.monotonic`.
        seconds: From then until it raised, or else until its process had ended.
        stderr: What it wrote there meanwhile; if it hung, also where.
        left: Whether processes that it had started outlived it by two seconds.
    """

    rank: int
    code: int | None = None
    hung: bool = False
    answered: bool = False
    answer: Any = None
    error: str = ""
    told: str = ""
    text: str = ""
    marked: float | None = None
    seconds: float | None = None
    stderr: str = ""
    left: bool = False

    def __str__(self) -> str:
        how = f"raised {self.error}" if self.error else "answered" if self.answered else "ended without an answer"
        how = "hung" if self.hung else how
        code = "" if self.code is None else f", exit code {self.code}"
        return f"--- rank {self.rank} {how}{code}\n{self.text}{self.stderr}"


class HungError(AssertionError):
    """Ranks were still at it, and none got on any more; all were killed.

    Attributes:
        outcomes: Of all ranks.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        hung = ", ".join(str(outcome.rank) for outcome in outcomes if outcome.hung)
        super().__init__(f"they stood still: of {len(outcomes)} ranks, still at it: {hung}\n{told_by(outcomes)}")
        self.outcomes = list(outcomes)


def answers(outcomes: Sequence[Outcome]) -> list[Any]:
    """What each rank returned, if all did.

    Raises:
        AssertionError: A rank raised, or died; it says what every rank had to say.
    """
    assert all(outcome.answered and not outcome.code for outcome in outcomes), told_by(outcomes)
    return [outcome.answer for outcome in outcomes]


def told_by(outcomes: Sequence[Outcome]) -> str:
    """What every rank had to say, in words."""
    return "\n".join(map(str, outcomes))
