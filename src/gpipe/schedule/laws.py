"""The laws that every program keeps, checked when it is built and not when it hangs.

Law 1. Each action is one of its stage's rank, on a micro-batch and a route that the program has, once, so that
       a stage closes once; each route leads to a later stage.
Law 2. Each (stage, micro-batch) has one forward; in training one backward, or one input and one weight backward.
       What a forward keeps is recomputed, or goes to the host and comes back, or neither. What was gathered is freed.
Law 3. Every SEND has one RECEIVE, and what crosses ranks is sent, but for what a TIE brings itself.
Law 4. Two ranks list the messages between them in one order.
Law 5. A legal total order exists; in it a closing action comes behind all that it closes.
Law 6. The forwards of a stage stand in the order of the micro-batches, and so do its backwards, input and weight
       backwards each: gradients are added up as in the plain loop, whatever the schedule. Of a micro-batch in
       slices, the last slice goes backward first.
Law 7. The REDUCEs of a rank stand from the last stage down, those of stages that tie behind the TIEs: replicas wait
       for each other in them, and one of fewer micro-batches may have another table.
"""

from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, combinations

from gpipe.schedule.action import CLOSING, COMPUTE, MOVES, SHARDS, TRANSFERS, Action, Kind, nth_backward
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.rules import closing_order, linearize, needs


def check(program: Program) -> None:
    """Checks the laws of a training or forward-only program.

    Raises:
        ScheduleError: Names every violation of law 1 at once, or if there is none every violation of the others.

    >>> from gpipe.schedule.lower import place_transfers
    >>> from gpipe.schedule.schedules import fill_drain
    >>> check(place_transfers(Program.of(fill_drain(stages=4, micro_batches=8), micro_batches=8)))
    """
    others = (_miscounted, _unmatched, _disordered, _deadlocked, _out_of_turn, _closed_out_of_turn)
    mistakes = list(_misplaced(program)) or list(chain.from_iterable(law(program) for law in others))
    if mistakes:
        raise ScheduleError("this program breaks the laws:\n" + "\n".join(f"- {text}" for text in mistakes))


def _misplaced(program: Program) -> Iterator[str]:
    for road, count in Counter(program.routes).items():
        if not 0 <= road.source < road.target < program.stages:
            yield f"route {road} does not lead from a stage to a later one"
        if count > 1:
            yield f"route {road} is listed {count} times"
    at_stage = [{*into, *out} for into, out in zip(program.routes_into, program.routes_from, strict=True)]
    for rank, row in enumerate(program.table):
        for action, count in Counter(row).items():
            route = action.route
            if count > 1:
                yield f"{action} appears {count} times"
            if not 0 <= action.stage < program.stages or program.rank_of[action.stage] != rank:
                yield f"{action} is an action of rank {rank}, which does not hold stage {action.stage}"
            elif action.kind not in CLOSING | SHARDS and action.micro_batch not in range(program.micro_batches):
                yield f"{action} has no micro-batch of 0 to {program.micro_batches - 1}"
            elif action.kind in CLOSING | SHARDS and action.micro_batch is not None:
                yield f"{action} is of its whole stage and has no micro-batch"
            elif action.kind in TRANSFERS and (route is None or route not in at_stage[action.stage]):
                yield f"{action} takes a route that the program does not have there"
            elif action.kind not in TRANSFERS and route is not None:
                yield f"{action} is no transfer and takes no route"


def _miscounted(program: Program) -> Iterator[str]:
    actions = program.actions
    forwards = {Kind.FORWARD, Kind.OFFLOAD, Kind.COMMIT, *SHARDS}
    trains = bool({action.kind for action in actions} - TRANSFERS - forwards)
    for stage in range(program.stages):
        alone = [kind.value for kind in SHARDS if Action(kind, stage) in actions]
        if len(alone) == 1:
            yield f"stage {stage} needs UNSHARD and RESHARD, or neither; it has {alone[0]}"
        for m in program.numbers:
            cell = {kind for kind in Kind if Action(kind, stage, m) in actions}
            if Kind.FORWARD not in cell:
                yield f"{Action(Kind.FORWARD, stage, m)} is missing"
            backward = cell - MOVES - {Kind.FORWARD, Kind.RECOMPUTE}
            whole = backward in ({Kind.BACKWARD}, {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
            if trains and not whole:
                found = ", ".join(sorted(kind.value for kind in backward)) or "none"
                yield f"stage {stage}, micro-batch {m} needs one B, or one I and one W; it has {found}"
            moved = cell & {*MOVES, Kind.RECOMPUTE}
            if moved & MOVES and moved != (MOVES if trains else {Kind.OFFLOAD}):
                found = ", ".join(sorted(kind.value for kind in moved))
                yield f"stage {stage}, micro-batch {m} needs OFFLOAD and FETCH alone, or neither; it has {found}"


def _unmatched(program: Program) -> Iterator[str]:
    actions = program.actions
    for action in sorted((a for a in actions if a.kind in TRANSFERS), key=str):
        if action.peer not in actions:
            yield f"{action} has no {action.peer}"
    if any(action.kind in TRANSFERS for action in actions):
        for action in sorted((a for a in actions if a.kind not in TRANSFERS | {Kind.TIE}), key=str):
            for need in needs(action, program):
                if program.rank_of[need.stage] != program.rank_of[action.stage]:
                    yield f"{action} needs {need} of another rank, and nothing is sent"


def _disordered(program: Program) -> Iterator[str]:
    for first, second in combinations(range(program.ranks), 2):
        listed, too = _messages(program, first, second), _messages(program, second, first)
        both = {*listed} & {*too}  # the others are unmatched
        ours, theirs = ([message for message in side if message in both] for side in (listed, too))
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one != other:
                yield f"ranks {first} and {second} list message {at} differently: {one} and {other}"
                break


def _deadlocked(program: Program) -> Iterator[str]:
    try:
        deque(linearize(program), maxlen=0)
    except ScheduleError as error:
        yield str(error)


def _out_of_turn(program: Program) -> Iterator[str]:
    for row in program.table:
        last: dict[tuple[Kind, int], Action] = {}
        for action in row:
            if action.kind in COMPUTE - {Kind.RECOMPUTE}:
                before = last.get((action.kind, action.stage), action)
                slices = 1 if action.kind is Kind.FORWARD else program.slices
                first, second = (nth_backward(each.micro_batch or 0, slices) for each in (before, action))
                if first > second:
                    yield f"{action} stands behind {before}; a stage takes the micro-batches in their order"
                last[action.kind, action.stage] = action


def _closed_out_of_turn(program: Program) -> Iterator[str]:
    for rank, row in enumerate(program.table):
        closing = [action for action in row if action.kind in (Kind.TIE, Kind.REDUCE)]
        wanted = sorted(closing, key=partial(closing_order, program))
        if closing != wanted:
            listed, right = (" ".join(map(str, some)) for some in (closing, wanted))
            yield f"rank {rank} closes its stages in the order {listed}; in all replicas it is {right}"


def _messages(program: Program, rank: int, peer: int) -> list[Action]:
    """What a rank exchanges with a peer, in the rank's order, each message as its SEND."""
    transfers = [action for action in program.table[rank] if action.kind in TRANSFERS]
    return [a if a.kind is Kind.SEND else a.peer for a in transfers if program.rank_of[a.peer.stage] == peer]
