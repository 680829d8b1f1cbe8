"""Schedules that a user gives: a program, or a function that makes one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gpipe.plan.action import CLOSING, TRANSFERS, Kind
from gpipe.plan.laws import check
from gpipe.plan.program import Program, Rows, ScheduleError
from gpipe.plan.schedules.placement import Placement

Maker: TypeAlias = Callable[[int, int], Program]
"""From the number of ranks and of micro-batches, a program of forwards and backwards alone."""

PLACED = {*TRANSFERS, *CLOSING, Kind.RECOMPUTE}
"""What a pipe places itself."""


def check_given(program: Program) -> None:
    """Checks a program that a pipe is to run.

    Raises:
        ScheduleError: It breaks the laws, leaves a rank without a stage, or has what a pipe places itself.

    >>> from gpipe.plan.schedules import fill_drain
    >>> check_given(Program.of(fill_drain(stages=2, micro_batches=2), micro_batches=2))
    """
    names = [kind.name for kind in Kind if kind in PLACED and any(a.kind is kind for a in program.actions)]
    if names:
        raise ScheduleError(
            f"the program has {', '.join(names)}, which a pipe places itself, by remat, skips, replicas and what "
            f"layers share; give forwards and backwards alone (FORWARD, and BACKWARD or BACKWARD_INPUT and "
            f"BACKWARD_WEIGHT): program.only(kinds)"
        )
    idle = set(range(program.ranks)) - set(program.rank_of)
    if idle:
        raise ScheduleError(f"the program leaves ranks {sorted(idle)} without a stage")
    check(program)


@dataclass(frozen=True)
class GivenProgram:
    """One program, for its own number of micro-batches."""

    program: Program

    def placement(self, ranks: int, stages_per_rank: int) -> Placement | None:
        """The program's, if it is for so many ranks."""
        return self.program.rank_of if ranks == self.program.ranks else None

    def rows(self, placement: Placement, micro_batches: int) -> Rows | None:
        """The program's, if it is for so many micro-batches."""
        return self.program.rows if micro_batches == self.program.micro_batches else None


@dataclass(frozen=True)
class MadeProgram:
    """Programs that a function makes, placed as that for a mini-batch of so many micro-batches is."""

    make: Maker
    micro_batches: int

    def placement(self, ranks: int, stages_per_rank: int) -> Placement | None:
        """That of the program for a whole mini-batch."""
        program = _made(self.make, ranks, self.micro_batches)
        if (program.ranks, program.micro_batches) != (ranks, self.micro_batches):
            raise ScheduleError(
                f"{_name(self.make)} was asked for K={ranks} ranks and M={self.micro_batches} micro-batches, and "
                f"gave a program of K={program.ranks} and M={program.micro_batches}"
            )
        return program.rank_of

    def rows(self, placement: Placement, micro_batches: int) -> Rows | None:
        """Those of the program for so many, if the function makes one with this placement."""
        try:
            program = _made(self.make, max(placement) + 1, micro_batches)
        except Exception:  # whatever it is that has no program of this size: a table of another will do
            return None
        same = (program.rank_of, program.micro_batches) == (placement, micro_batches)
        return program.rows if same else None


def _made(make: Maker, ranks: int, micro_batches: int) -> Program:
    try:
        program = make(ranks, micro_batches)
    except Exception as error:
        error.add_note(f"in schedule={_name(make)}, asked for K={ranks} ranks and M={micro_batches} micro-batches")
        raise
    if not isinstance(program, Program):
        raise ScheduleError(f"{_name(make)} gave {type(program).__name__}, which is no Program")
    check_given(program)
    return program


def _name(make: Maker) -> str:
    return getattr(make, "__qualname__", type(make).__name__)
