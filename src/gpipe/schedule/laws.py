"""Checks the laws of programs. `check` runs when a program is built, so that no program hangs in training.

Law 1. Every action belongs to a stage of its rank and appears once. Its micro-batch and its route exist in the
       program. Every route leads to a later stage.
Law 2. Every stage has one forward per micro-batch. In training it also has one backward, or one input-gradient and
       one weight-gradient backward. Activations are recomputed, or offloaded and fetched, or kept. Inputs of a
       recompute can be offloaded and fetched. Gathered weights are freed.
Law 3. Every SEND has one RECEIVE. Every output or gradient that a different rank needs is sent, except gradients that
       a TIE exchanges.
Law 4. Two ranks list the messages between them in the same order.
Law 5. The actions have a valid total order. In this order, a closing action (REDUCE, TIE or COMMIT) follows all
       actions that it depends on.
Law 6. Each stage runs its forward passes in the order of the micro-batches. The same holds for its backward passes,
       and for input-gradient and weight-gradient passes separately. So gradients are accumulated in the order of the
       reference loop. Within a micro-batch, the last slice runs backward first.
Law 7. Each rank lists its REDUCEs from the last stage to the first. REDUCEs of stages with a TIE follow all TIEs. So
       all replicas reduce in the same order, even if some replicas have fewer micro-batches.
Law 8. If a stage is loaded, all its computations are between a LOAD and its FREE, and these are numbered in order.
       A backward without a recompute is between the same LOAD and FREE as its forward.
"""

from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, combinations

from gpipe.schedule.action import CLOSING, COMPUTE, MOVES, SHARDS, STREAMS, TRANSFERS, Action, Kind, nth_backward
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.rules import BACKWARDS, closing_order, linearize, needs


def check(program: Program) -> None:
    """Checks the laws of a training or forward-only program.

    Args:
        program: The program, before or after `place_transfers`. If the program has transfers, `check` also checks the
            transfers.

    Raises:
        ScheduleError: If the program breaks a law. The message lists all violations of law 1. If the program obeys
            law 1, the message lists all violations of the other laws.

    >>> from gpipe.schedule.lower import place_transfers
    >>> from gpipe.schedule.schedules import fill_drain
    >>> check(place_transfers(Program.of(fill_drain(stages=4, micro_batches=8), micro_batches=8)))
    """
    others = (
        _find_incomplete,
        _find_unsent,
        _find_message_order,
        _find_deadlock,
        _find_order,
        _find_closing_order,
        _find_away,
    )
    mistakes = list(_find_misplaced(program)) or list(chain.from_iterable(law(program) for law in others))
    if mistakes:
        raise ScheduleError("The program is not valid. Fix these errors:\n" + "\n".join(f"- {m}" for m in mistakes))


def _find_misplaced(program: Program) -> Iterator[str]:
    for route, count in Counter(program.routes).items():
        if not 0 <= route.source < route.target < program.stages:
            yield f"Route {route} does not lead to a later stage."
        if count > 1:
            yield f"Route {route} appears {count} times."
    routes_at = [{*into, *out} for into, out in zip(program.routes_into, program.routes_from, strict=True)]
    for rank, row in enumerate(program.table):
        for action, count in Counter(row).items():
            if count > 1:
                yield f"{action} appears {count} times."
            if not 0 <= action.stage < program.stages or program.rank_of[action.stage] != rank:
                yield f"{action} is in the row of rank {rank}, which does not have stage {action.stage}."
            elif action.kind not in CLOSING | SHARDS | STREAMS and action.micro_batch not in range(
                program.micro_batches
            ):
                yield f"{action} needs a micro-batch from 0 to {program.micro_batches - 1}."
            elif action.kind in CLOSING | SHARDS and action.micro_batch is not None:
                yield f"{action} cannot have a micro-batch, because it applies to the whole stage."
            elif action.kind in TRANSFERS and (action.route is None or action.route not in routes_at[action.stage]):
                yield f"{action} needs a route of the program that starts or ends at stage {action.stage}."
            elif action.kind not in TRANSFERS and action.route is not None:
                yield f"{action} cannot have a route, because it is not a SEND or RECEIVE."


def _find_incomplete(program: Program) -> Iterator[str]:
    actions = program.actions
    forwards = {Kind.FORWARD, Kind.OFFLOAD, Kind.COMMIT, *SHARDS, *STREAMS}
    trains = bool({action.kind for action in actions} - TRANSFERS - forwards)
    for stage in range(program.stages):
        shards = [kind.value for kind in SHARDS if Action(kind, stage) in actions]
        if len(shards) == 1:
            yield f"Stage {stage} needs UNSHARD and RESHARD, or neither. It has {shards[0]}."
        for m in program.numbers:
            kinds = {kind for kind in {*Kind} - STREAMS if Action(kind, stage, m) in actions}
            if Kind.FORWARD not in kinds:
                yield f"{Action(Kind.FORWARD, stage, m)} is missing."
            backward = kinds - MOVES - {Kind.FORWARD, Kind.RECOMPUTE}
            whole = backward in ({Kind.BACKWARD}, {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
            if trains and not whole:
                listed = ", ".join(sorted(kind.value for kind in backward)) or "none"
                yield f"Stage {stage}, micro-batch {m} needs one B, or one I and one W. It has {listed}."
            moved = kinds & MOVES
            if moved and moved != (MOVES if trains else {Kind.OFFLOAD}):
                listed = ", ".join(sorted(kind.value for kind in moved))
                yield f"Stage {stage}, micro-batch {m} needs OFFLOAD and FETCH, or neither. It has {listed}."


def _find_unsent(program: Program) -> Iterator[str]:
    actions = program.actions
    for action in sorted((a for a in actions if a.kind in TRANSFERS), key=str):
        if action.peer not in actions:
            yield f"{action} needs {action.peer}, which is missing."
    if any(action.kind in TRANSFERS for action in actions):
        for action in sorted((a for a in actions if a.kind not in TRANSFERS | {Kind.TIE}), key=str):
            for need in needs(action, program):
                if program.rank_of[need.stage] != program.rank_of[action.stage]:
                    yield f"{action} needs the result of {need}, but its rank does not send it."


def _find_message_order(program: Program) -> Iterator[str]:
    for first, second in combinations(range(program.ranks), 2):
        messages = [_messages(program, first, second), _messages(program, second, first)]
        matched = {*messages[0]} & {*messages[1]}  # _find_unsent reports the others.
        ordered = ([message for message in side if message in matched] for side in messages)
        for index, (message, other) in enumerate(zip(*ordered, strict=True)):
            if message != other:
                yield f"Ranks {first} and {second} list message {index} differently: {message} and {other}."
                break


def _find_deadlock(program: Program) -> Iterator[str]:
    try:
        deque(linearize(program), maxlen=0)
    except ScheduleError as error:
        yield str(error)


def _find_order(program: Program) -> Iterator[str]:
    for row in program.table:
        last: dict[tuple[Kind, int], Action] = {}
        for action in row:
            if action.kind in COMPUTE - {Kind.RECOMPUTE}:
                before = last.get((action.kind, action.stage), action)
                slices = 1 if action.kind is Kind.FORWARD else program.slices
                first, second = (nth_backward(a.micro_batch or 0, slices) for a in (before, action))
                if first > second:
                    yield f"{action} comes after {before}. A stage must run the micro-batches in order."
                last[action.kind, action.stage] = action


def _find_closing_order(program: Program) -> Iterator[str]:
    for rank, row in enumerate(program.table):
        closing = [action for action in row if action.kind in (Kind.TIE, Kind.REDUCE)]
        expected = sorted(closing, key=partial(closing_order, program))
        if closing != expected:
            listed, correct = (" ".join(map(str, actions)) for actions in (closing, expected))
            yield f"Rank {rank} lists {listed}. The order in all replicas must be {correct}."


def _find_away(program: Program) -> Iterator[str]:
    loaded = {action.stage for action in program.actions if action.kind is Kind.LOAD}
    for row in program.table:
        here, times = dict[int, int](), Counter[int]()  # by stage: the number of the LOAD, and of LOADs so far
        for action in row:
            stage, number = action.stage, action.micro_batch
            if action.kind is Kind.LOAD:
                if stage in here or number != times[stage]:
                    yield f"{action} must follow the FREE of the preceding LOAD, with the next number."
                here[stage] = times[stage]
                times[stage] += 1
            elif action.kind is Kind.FREE and here.pop(stage, None) != number:
                yield f"{action} does not follow its LOAD."
            elif action.kind in COMPUTE and stage in loaded and stage not in here:
                yield f"{action} needs the weights of stage {stage}, which are not loaded."
        yield from (f"Stage {stage} is loaded, but not freed." for stage in here)
    for action, load in program.load_of.items():
        kept = action.kind in BACKWARDS and action._replace(kind=Kind.RECOMPUTE) not in program.actions
        if kept and program.load_of.get(action._replace(kind=Kind.FORWARD), load) != load:
            yield f"{action} needs a recompute, because the weights of its forward were freed."


def _messages(program: Program, rank: int, peer: int) -> list[Action]:
    """Returns the messages between two ranks, in the order in which the first rank lists them.

    Each message is represented by its SEND.
    """
    transfers = [action for action in program.table[rank] if action.kind in TRANSFERS]
    return [a if a.kind is Kind.SEND else a.peer for a in transfers if program.rank_of[a.peer.stage] == peer]
