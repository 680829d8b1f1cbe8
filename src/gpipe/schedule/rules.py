"""Defines the dependencies between actions, and computes orders that respect them.

Rule 1. A forward needs its inputs: for each route into its stage, the forward of the route's source.
Rule 2. A recompute needs the forward of its stage and micro-batch, and the FETCH if its inputs were offloaded.
Rule 3. A backward needs its recompute, or its forward if nothing is recomputed. If its activations were offloaded,
        the backward also needs the FETCH. For each route that starts at its stage, the backward needs the backward of
        the target stage.
Rule 4. A weight backward needs its input backward, an OFFLOAD needs its forward, and a FETCH needs its OFFLOAD.
Rule 5. Between ranks, a SEND and its RECEIVE carry an output or a gradient. The receiver then depends on the RECEIVE.
Rule 6. A closing action needs earlier actions of its stage: COMMIT needs the forwards, TIE needs the backwards, and
        REDUCE needs the backwards and the TIE.
Rule 7. With slices, a forward needs the forward of the preceding slice at its stage (keys and values). A backward
        needs the backward of the following slice (gradients of keys and values).
Rule 8. A TIE sums the gradients of all stages with a TIE, so it needs the backwards of all these stages. The TIE
        itself communicates, without SEND and RECEIVE.
Rule 9. All computations of a stage need its UNSHARD. Its RESHARD needs all its computations.
Rule 10. A computation needs the last LOAD of its stage before it. A FREE needs its LOAD and all computations since.
        A LOAD needs the preceding FREE of its stage. REDUCE and TIE need all FREEs that follow backwards.

Actions that a program does not contain count as done before it starts. In a program without transfers, an action
depends directly on the action that computes its input. So the same rules hold for schedules without transfers, for
complete programs, and for the forward or backward half of a program.
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
    """Returns the actions of the program that must be done before this action, without duplicates.

    >>> from gpipe.schedule.action import parse_action
    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=1), micro_batches=1)
    >>> [str(need) for need in needs(parse_action("0B0"), program)]
    ['0F0', '1B0']
    """
    unshard = [Action(Kind.UNSHARD, action.stage)] if action.kind in COMPUTE else []
    load = [program.load_of[action]] if action in program.load_of else []
    candidates = chain(_direct_needs(action, program), unshard, load)
    return tuple(dict.fromkeys(filter(program.actions.__contains__, candidates)))


def _direct_needs(action: Action, program: Program) -> Iterator[Action]:
    stage, m = action.stage, action.micro_batch
    match action.kind:
        case Kind.FORWARD:
            yield from _inputs(action, program)
            yield from _neighbor_slice(action, program, -1)
        case Kind.RECOMPUTE | Kind.OFFLOAD:
            yield Action(Kind.FORWARD, stage, m)
            yield from [Action(Kind.FETCH, stage, m)] if action.kind is Kind.RECOMPUTE else []
        case Kind.FETCH:
            yield Action(Kind.OFFLOAD, stage, m)
        case Kind.BACKWARD | Kind.BACKWARD_INPUT:
            recompute = Action(Kind.RECOMPUTE, stage, m)
            yield recompute if recompute in program.actions else Action(Kind.FORWARD, stage, m)
            yield Action(Kind.FETCH, stage, m)
            yield from _inputs(action, program)
            yield from _neighbor_slice(action, program, 1)
        case Kind.BACKWARD_WEIGHT:
            yield Action(Kind.BACKWARD_INPUT, stage, m)
        case Kind.SEND:
            yield from _sources(action)
        case Kind.RECEIVE:
            yield action.peer
        case Kind.COMMIT:
            yield from _all_of(stage, program, (Kind.FORWARD,))
        case Kind.TIE:
            tied = [s for s in range(program.stages) if s == stage or Action(Kind.TIE, s) in program.actions]
            yield from (backward for s in tied for backward in _all_of(s, program, BACKWARD_PARTS))
            yield from _frees(stage, program)
        case Kind.REDUCE:
            yield from (*_all_of(stage, program, BACKWARD_PARTS), Action(Kind.TIE, stage), *_frees(stage, program))
        case Kind.UNSHARD | Kind.RESHARD | Kind.LOAD | Kind.FREE:
            yield from _weight_needs(action, program)
        case _:
            assert_never(action.kind)


def _weight_needs(action: Action, program: Program) -> Iterator[Action]:
    if action.kind is Kind.RESHARD:
        yield from _all_of(action.stage, program, COMPUTE)
    elif action.kind is Kind.LOAD:
        yield action._replace(kind=Kind.FREE, micro_batch=(action.micro_batch or 0) - 1)
    elif action.kind is Kind.FREE:
        load = action._replace(kind=Kind.LOAD)
        yield from (load, *program.uses_of.get(load, ()))


def _frees(stage: int, program: Program) -> Iterator[Action]:
    """Yields the FREEs that copy gradients of a stage to host memory."""
    for load, uses in program.uses_of.items():
        if load.stage == stage and any(use.kind in BACKWARD_PARTS for use in uses):
            yield load._replace(kind=Kind.FREE)


def _neighbor_slice(action: Action, program: Program, step: int) -> Iterator[Action]:
    """Yields the same action for the slice `step` positions away, if this slice is in the same micro-batch."""
    slices, number = program.slices, action.micro_batch or 0
    if 0 <= number % slices + step < slices:
        yield Action(action.kind, action.stage, Slice(number + step, slices))


def _all_of(stage: int, program: Program, kinds: Iterable[Kind]) -> Iterator[Action]:
    return (Action(kind, stage, m) for kind in kinds for m in program.numbers)


def closing_order(program: Program, closing: Action) -> tuple[int, int]:
    """Returns the sort key of a REDUCE or TIE. The key is the same in all replicas, even if their programs differ."""
    if closing.kind is Kind.TIE:
        return 1, closing.stage
    tied = Action(Kind.TIE, closing.stage) in program.actions
    return 2 if tied else 0, -closing.stage


def fed_by(action: Action, program: Program) -> tuple[Route, ...]:
    """Returns the routes of the inputs of an action: values for a forward, gradients for a backward."""
    if action.kind is Kind.FORWARD:
        return program.routes_into[action.stage]
    return program.routes_from[action.stage] if action.kind in BACKWARDS else ()


def feeds(action: Action, program: Program) -> tuple[Route, ...]:
    """Returns the routes of the outputs of an action: values of a forward, gradients of a backward."""
    if action.kind is Kind.FORWARD:
        return program.routes_from[action.stage]
    return program.routes_into[action.stage] if action.kind in BACKWARDS else ()


def crossing(action: Action, program: Program) -> Iterator[Action]:
    """Yields the SENDs that carry the outputs of an action to other ranks."""
    for route in feeds(action, program):
        if program.rank_of[route.source] != program.rank_of[route.target]:
            yield Action(Kind.SEND, action.stage, action.micro_batch, route)


def _inputs(action: Action, program: Program) -> Iterator[Action]:
    for route in fed_by(action, program):
        receive = Action(Kind.RECEIVE, action.stage, action.micro_batch, route)
        if receive in program.actions:
            yield receive
        else:
            yield from _sources(receive.peer)


def _sources(send: Action) -> Iterator[Action]:
    """Yields the actions that may compute the value of a SEND."""
    for kind in BACKWARDS if send.carries_gradient else (Kind.FORWARD,):
        yield Action(kind, send.stage, send.micro_batch)


def linearize(program: Program, rng: Random | None = None) -> Iterator[tuple[int, int, Action]]:
    """Yields all actions in an order that respects their dependencies, as (rank, index in its row, action).

    By default, ranks advance in lockstep: in each round, every rank whose next action is ready executes it. With
    `rng`, a random rank advances each time.

    Args:
        program: The program.
        rng: Chooses the next rank among the ranks whose next action is ready. Default: None, ranks advance in
            lockstep.

    Returns:
        An iterator. If the program deadlocks, the iterator raises the error after the last possible action.

    Raises:
        ScheduleError: If the program deadlocks. The message lists the action that each rank waits for.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=2), micro_batches=2)
    >>> " ".join(str(action) for _, _, action in linearize(program))
    '0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1'
    """
    return ((rank, index, action) for rank, index, action, _ in linearize_with_needs(program, rng))


NextAction: TypeAlias = tuple[int, int, Action, tuple[Action, ...]]
"""The next action of a rank: the rank, the index in its row, the action, and the actions that it needs."""


def linearize_with_needs(program: Program, rng: Random | None = None) -> Iterator[NextAction]:
    """Yields the same actions as `linearize`, each with the actions that it needs."""

    def next_action(rank: int, index: int) -> NextAction:
        action = program.table[rank][index]
        return rank, index, action, needs(action, program)

    fronts = {rank: next_action(rank, 0) for rank, row in enumerate(program.table) if row}
    done: set[Action] = set()
    while fronts:
        ready = [front for front in fronts.values() if done.issuperset(front[-1])]
        if not ready:
            lines = ["The program deadlocks:"]
            for rank, index, _, needed in fronts.values():
                missing = ", ".join(str(need) for need in needed if need not in done)
                lines.append(f"rank {rank} waits for {missing}: {program.around(rank, index)}")
            raise ScheduleError("\n".join(lines))
        for rank, index, action, needed in [rng.choice(ready)] if rng else ready:
            yield rank, index, action, needed
            done.add(action)
            if index + 1 < len(program.table[rank]):
                fronts[rank] = next_action(rank, index + 1)
            else:
                del fronts[rank]
