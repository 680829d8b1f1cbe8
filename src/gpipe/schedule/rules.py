"""Says which actions an action needs, the one rule that all of gpipe goes by; and finds orders that keep it.

Rule 1. A forward needs what its stage's incoming routes carry: the forward of each route's source.
Rule 2. A recompute needs the forward of its own stage and micro-batch.
Rule 3. A backward needs its own recompute, or its forward where nothing is recomputed; the FETCH of what its forward
        kept, where that was moved; and the gradient that each outgoing route brings back: the backward of each
        route's target.
Rule 4. A weight backward needs its input backward; an OFFLOAD its forward, and a FETCH its OFFLOAD.
Rule 5. Between two ranks a value or gradient is carried by a SEND and its RECEIVE, which stand for it.
Rule 6. A closing action needs all that its stage did before: COMMIT the forwards, TIE the backwards, REDUCE both the
        backwards and the TIE.
Rule 7. Of a micro-batch in slices a forward needs that of the slice before at its stage, for keys and values, and a
        backward that of the slice behind, for their gradients.
Rule 8. A TIE adds up what all stages with a TIE have, so it needs their backwards too; no SEND brings them, it does.
Rule 9. What a stage computes needs its UNSHARD, and its RESHARD all that it computes.

An action that a program does not hold was done before the program began; a transfer that it does not hold (yet) is
looked through. So the same rule serves bare schedules, whole programs and the forward or backward half of one.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from random import Random
from typing import TypeAlias, assert_never

from gpipe.schedule.action import COMPUTE, Action, Kind, Route, Slice
from gpipe.schedule.program import Program, ScheduleError

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
BACKWARD_PARTS = (*BACKWARDS, Kind.BACKWARD_WEIGHT)


def needs(action: Action, program: Program) -> tuple[Action, ...]:
    """The actions of the program that must be done before this one, each once.

    >>> from gpipe.schedule.action import parse_action
    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=1), micro_batches=1)
    >>> [str(need) for need in needs(parse_action("0B0"), program)]
    ['0F0', '1B0']
    """
    gather = [Action(Kind.UNSHARD, action.stage)] if action.kind in COMPUTE else []
    found = chain(_direct_needs(action, program), gather)
    return tuple(dict.fromkeys(filter(program.actions.__contains__, found)))


def _direct_needs(action: Action, program: Program) -> Iterator[Action]:
    stage, m = action.stage, action.micro_batch
    match action.kind:
        case Kind.FORWARD:
            yield from _brought(action, program)
            yield from _beside(action, program, -1)
        case Kind.RECOMPUTE | Kind.OFFLOAD:
            yield Action(Kind.FORWARD, stage, m)
        case Kind.FETCH:
            yield Action(Kind.OFFLOAD, stage, m)
        case Kind.BACKWARD | Kind.BACKWARD_INPUT:
            recompute = Action(Kind.RECOMPUTE, stage, m)
            yield recompute if recompute in program.actions else Action(Kind.FORWARD, stage, m)
            yield Action(Kind.FETCH, stage, m)
            yield from _brought(action, program)
            yield from _beside(action, program, 1)
        case Kind.BACKWARD_WEIGHT:
            yield Action(Kind.BACKWARD_INPUT, stage, m)
        case Kind.SEND:
            yield from _made(action)
        case Kind.RECEIVE:
            yield action.peer
        case Kind.COMMIT:
            yield from _all_of(stage, program, (Kind.FORWARD,))
        case Kind.TIE:
            tied = [s for s in range(program.stages) if s == stage or Action(Kind.TIE, s) in program.actions]
            yield from (backward for s in tied for backward in _all_of(s, program, BACKWARD_PARTS))
        case Kind.REDUCE:
            yield from (*_all_of(stage, program, BACKWARD_PARTS), Action(Kind.TIE, stage))
        case Kind.UNSHARD | Kind.RESHARD:
            yield from _all_of(stage, program, COMPUTE if action.kind is Kind.RESHARD else ())
        case _:
            assert_never(action.kind)


def _beside(action: Action, program: Program, step: int) -> Iterator[Action]:
    """The same at the same stage of the slice behind or before, if the micro-batch has one there."""
    slices, number = program.slices, action.micro_batch or 0
    if 0 <= number % slices + step < slices:
        yield Action(action.kind, action.stage, Slice(number + step, slices))


def _all_of(stage: int, program: Program, kinds: Iterable[Kind]) -> Iterator[Action]:
    return (Action(kind, stage, m) for kind in kinds for m in program.numbers)


def closing_order(program: Program, closing: Action) -> tuple[int, int]:
    """By what the REDUCE and TIE of a rank are ordered: alike in all replicas, whatever their tables."""
    if closing.kind is Kind.TIE:
        return 1, closing.stage
    tied = Action(Kind.TIE, closing.stage) in program.actions
    return 2 if tied else 0, -closing.stage


def fed_by(action: Action, program: Program) -> tuple[Route, ...]:
    """The routes that bring an action what it needs of other stages: values a forward, gradients a backward."""
    if action.kind is Kind.FORWARD:
        return program.routes_into[action.stage]
    return program.routes_from[action.stage] if action.kind in BACKWARDS else ()


def feeds(action: Action, program: Program) -> tuple[Route, ...]:
    """The routes that take on what an action made: values of a forward, gradients of a backward."""
    if action.kind is Kind.FORWARD:
        return program.routes_from[action.stage]
    return program.routes_into[action.stage] if action.kind in BACKWARDS else ()


def crossing(action: Action, program: Program) -> Iterator[Action]:
    """The SENDs that take what an action made to other ranks."""
    for route in feeds(action, program):
        if program.rank_of[route.source] != program.rank_of[route.target]:
            yield Action(Kind.SEND, action.stage, action.micro_batch, route)


def _brought(action: Action, program: Program) -> Iterator[Action]:
    for route in fed_by(action, program):
        receive = Action(Kind.RECEIVE, action.stage, action.micro_batch, route)
        if receive in program.actions:
            yield receive
        else:
            yield from _made(receive.peer)


def _made(send: Action) -> Iterator[Action]:
    """What makes that which a SEND sends."""
    for kind in BACKWARDS if send.carries_gradient else (Kind.FORWARD,):
        yield Action(kind, send.stage, send.micro_batch)


def linearize(program: Program, rng: Random | None = None) -> Iterator[tuple[int, int, Action]]:
    """Yields (rank, place in its row, action), each action after all that it needs.

    Without `rng` all ranks that can go on do so in turn, one action each, which keeps them in step; with it, one of
    them drawn at random.

    Raises:
        ScheduleError: The program deadlocks; the error says which rank waits for what.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=2), micro_batches=2)
    >>> " ".join(str(action) for _, _, action in linearize(program))
    '0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1'
    """
    return ((rank, place, action) for rank, place, action, _ in linearize_with_needs(program, rng))


Due: TypeAlias = tuple[int, int, Action, tuple[Action, ...]]
"""A rank, the place in its row that it has come to, the action there, and what that needs."""


def linearize_with_needs(program: Program, rng: Random | None = None) -> Iterator[Due]:
    """Yields what `linearize` does, and what each action needs."""

    def due(rank: int, place: int) -> Due:
        action = program.table[rank][place]
        return rank, place, action, needs(action, program)

    fronts = {rank: due(rank, 0) for rank, row in enumerate(program.table) if row}
    done: set[Action] = set()
    while fronts:
        ready = [due for due in fronts.values() if done.issuperset(due[-1])]
        if not ready:
            lines = ["deadlock:"]
            for rank, place, _, needed in fronts.values():
                missing = ", ".join(str(need) for need in needed if need not in done)
                lines.append(f"rank {rank} waits for {missing}: {program.around(rank, place)}")
            raise ScheduleError("\n".join(lines))
        for rank, place, action, needed in [rng.choice(ready)] if rng else ready:
            yield rank, place, action, needed
            done.add(action)
            if place + 1 < len(program.table[rank]):
                fronts[rank] = due(rank, place + 1)
            else:
                del fronts[rank]
