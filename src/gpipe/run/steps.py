"""The rows of a program as workers do them in one process: what to wait for, what to do."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, assert_never

from gpipe.plan.action import TRANSFERS, Action, Kind
from gpipe.plan.order import linearize
from gpipe.plan.program import Program
from gpipe.run.lane import Mark
from gpipe.run.worker import Worker


class Step(NamedTuple):
    """One action of a row as a worker does it: first what it waits for, if it does, then the work."""

    rank: int
    at: int  # its place in the program's row
    action: Action
    wait: Callable[[Worker, Action], Mark] | None
    work: Callable[[Worker, Action], None]


@dataclass(frozen=True)
class Part:
    """A program or half of one, as it is walked in one process.

    It has no transfers: a mailbox always has room, so whoever makes a value hands it over at once, and whoever needs
    it waits for it. `order`, if given, is the order in which one thread alone walks it; any legal one gives the same
    bits.
    """

    program: Program
    order: Sequence[tuple[int, int, Action]] = ()

    @cached_property
    def rows(self) -> tuple[tuple[Step, ...], ...]:
        """What each rank does."""
        return tuple(
            _steps((rank, at, action) for at, action in enumerate(row)) for rank, row in enumerate(self.program.rows)
        )

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What all ranks do, in one legal total order."""
        return _steps(self.order or linearize(self.program))


def _steps(order: Iterable[tuple[int, int, Action]]) -> tuple[Step, ...]:
    return tuple(Step(rank, at, action, *_way(action)) for rank, at, action in order if action.kind not in TRANSFERS)


def _way(action: Action) -> tuple[Callable[[Worker, Action], Mark] | None, Callable[[Worker, Action], None]]:
    match action.kind:
        case Kind.FORWARD:
            return Worker.await_values, Worker.forward
        case Kind.RECOMPUTE:
            return None, Worker.recompute  # waits for no gradient: it hides in the bubble
        case Kind.BACKWARD:
            return Worker.await_gradients, Worker.backward
        case Kind.COMMIT:
            return None, Worker.commit
        case Kind.BACKWARD_INPUT | Kind.BACKWARD_WEIGHT | Kind.REDUCE | Kind.TIE | Kind.SEND | Kind.RECEIVE:
            raise ValueError(f"{action} cannot be done within one process")
        case _:
            assert_never(action.kind)
