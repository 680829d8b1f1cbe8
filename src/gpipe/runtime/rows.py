"""The rows of a program as workers do them: what each step takes, does and gives."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from gpipe.plan.action import TRANSFERS, Action, Kind
from gpipe.plan.order import linearize
from gpipe.plan.program import Program
from gpipe.plan.rules import sender_of
from gpipe.runtime.steps import Wire, Wiring
from gpipe.runtime.worker import Step, Worker
from gpipe.values.messages import Label


@dataclass(frozen=True)
class Inbound:
    """What a rank receives from others: for each message the place of its RECEIVE in the row, and who sends it."""

    due: Mapping[Label, int]
    senders: Mapping[Label, int]


@dataclass(frozen=True)
class CompiledRows:
    """A program or half of one, as it is walked.

    It has no transfers: whoever makes a value hands it over at once, and whoever needs it waits for it. `order`, if
    given, is the order in which one thread alone walks it; any legal one gives the same bits.
    """

    program: Program
    wirings: Sequence[Wiring]
    order: Sequence[tuple[int, int, Action]] = ()

    @cached_property
    def rows(self) -> tuple[tuple[Step, ...], ...]:
        """What each rank does."""
        return tuple(
            self._steps((rank, at, action) for at, action in enumerate(row))
            for rank, row in enumerate(self.program.rows)
        )

    @cached_property
    def inbound(self) -> tuple[Inbound, ...]:
        """What each rank receives."""
        return tuple(map(self._inbound, self.program.rows))

    def _inbound(self, row: Sequence[Action]) -> Inbound:
        numbers = {route: number for number, route in enumerate(self.program.routes)}
        due, senders = {}, {}
        for at, action in enumerate(row):
            if action.kind is Kind.RECEIVE:
                assert action.route is not None
                assert action.micro_batch is not None
                label = Label(numbers[action.route], action.micro_batch, action.carries_gradient)
                due[label], senders[label] = at, self.program.rank_of[sender_of(action)]
        return Inbound(due, senders)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What all ranks do, in one legal total order."""
        return self._steps(self.order or linearize(self.program))

    def _steps(self, order: Iterable[tuple[int, int, Action]]) -> tuple[Step, ...]:
        return tuple(
            _step(rank, at, action, self.wirings[action.stage])
            for rank, at, action in order
            if action.kind not in TRANSFERS
        )


def _step(rank: int, at: int, action: Action, wires: Wiring) -> Step:
    m = 0 if action.micro_batch is None else action.micro_batch
    takes: Sequence[Wire] = ()
    gives: Sequence[Wire] = ()
    gradient = action.kind is Kind.BACKWARD
    if action.kind is Kind.FORWARD:
        takes, gives = wires.ins, wires.outs
    elif gradient:
        takes, gives = wires.outs, wires.ins
    return Step(
        rank,
        at,
        action,
        action.stage,
        m,
        tuple(Label(wire.number, m, gradient) for wire in takes),
        tuple((wire.rank, Label(wire.number, m, gradient)) for wire in gives),
        _work(action),
    )


def _work(action: Action) -> Callable[[Worker, Step], None]:
    match action.kind:
        case Kind.FORWARD:
            return Worker.forward
        case Kind.RECOMPUTE:
            return Worker.recompute  # takes nothing: it does not wait for its gradient, and hides in the bubble
        case Kind.BACKWARD:
            return Worker.backward
        case Kind.COMMIT:
            return Worker.commit
        case Kind.TIE | Kind.REDUCE:
            return Worker.close
        case Kind.BACKWARD_INPUT | Kind.BACKWARD_WEIGHT | Kind.SEND | Kind.RECEIVE:
            raise ValueError(f"{action} is not done by a worker")
        case _:
            assert_never(action.kind)
