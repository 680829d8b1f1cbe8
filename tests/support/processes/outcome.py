"""How a job over processes ended, on each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank."""

    rank: int
    code: int | None = None  # what the process ended with, a signal as its negative number; None if it lives, or hung
    hung: bool = False  # it had to be ended, as nothing moved or because it was meant to be stuck
    answered: bool = False  # the job returned
    answer: Any = None
    error: str = ""  # the name of the type of what it raised
    told: str = ""  # the text of that, with its notes
    text: str = ""  # the same with the whole traceback
    marked: float | None = None  # when any rank first said `mark()`, in seconds of `time.monotonic`
    seconds: float | None = None  # from then until it raised, or else until its process had ended
    stderr: str = ""  # what it wrote there meanwhile; if it hung, also where
    left: bool = False  # processes that it had started outlived it by two seconds

    def __str__(self) -> str:
        how = f"raised {self.error}" if self.error else "answered" if self.answered else "ended without an answer"
        how = "hung" if self.hung else how
        code = "" if self.code is None else f", exit code {self.code}"
        return f"--- rank {self.rank} {how}{code}\n{self.text}{self.stderr}"


class HungError(AssertionError):
    """Ranks were still at it, and none got on any more; all were killed."""

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
    return "\n".join(map(str, outcomes))
