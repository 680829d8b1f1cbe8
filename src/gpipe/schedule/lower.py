"""Passes from a bare schedule to a program that can be run: each takes a program and gives a fuller one."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias, get_args

from gpipe.schedule.action import TRANSFERS, Action, Kind
from gpipe.schedule.cost import Costs
from gpipe.schedule.program import Program, Row
from gpipe.schedule.rules import BACKWARDS, closing_order, feeds, linearize, receiver_of
from gpipe.schedule.simulate import simulate

RematName: TypeAlias = Literal["always", "except_last", "never"]
Remat: TypeAlias = RematName | int
"""By name; or how many micro-batches, at most, keep at once what their forwards made."""
REMATS: tuple[str, ...] = get_args(RematName)


def place_recompute(program: Program, remat: Sequence[Remat], *, halved: bool = False) -> Program:
    """Puts R before each backward of a stage, by the stage's `remat`; for a program without transfers.

    R stands before the backward and waits for no gradient, so it runs while the gradient is under way. `recomputed`
    says of which micro-batches.

    Args:
        program: Bare rows.
        remat: Of each stage.
        halved: The program will be cut by `halves`, and between the two anything may happen.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> bare = Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2)
    >>> place_recompute(bare, ["except_last"]).around(0, 2)
    '0F0 0F1 >0B0< 0R1 0B1'
    """

    def with_recompute(row: Row) -> Iterator[Action]:
        again = recomputed(row, remat, halved=halved)
        for action in row:
            if action.kind in BACKWARDS and (action.stage, action.micro_batch) in again:
                yield Action(Kind.RECOMPUTE, action.stage, action.micro_batch)
            yield action

    return program.with_rows(map(with_recompute, program.rows))


def recomputed(row: Row, remat: Sequence[Remat], *, halved: bool = False) -> set[tuple[int, int | None]]:
    """The stages and micro-batches of a bare row whose forward is run again before their backward.

    Nothing is recomputed where a backward follows its own forward with nothing between: it would keep nothing from
    growing. `"except_last"` keeps what the forward of micro-batch 0 made, whose backward comes first: one inside
    more. A number n keeps what a forward made wherever fewer than n others of its stage are kept just then.

    >>> from gpipe.schedule.action import parse_action
    >>> row = [parse_action(text) for text in "0F0 0F1 0B0 0F2 0B1 0B2".split()]
    >>> recomputed(row, ["except_last"]), recomputed(row, [1])
    ({(0, 1), (0, 2)}, {(0, 1)})
    """
    again: set[tuple[int, int | None]] = set()
    kept: dict[int, set[int | None]] = defaultdict(set)
    for action, after in zip(row, (*row[1:], None), strict=True):
        stage, m = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            back = after is not None and after.kind in BACKWARDS and (after.stage, after.micro_batch) == (stage, m)
            follows = back and not halved
            if not follows and _recomputes(remat[stage], m, len(kept[stage])):
                again.add((stage, m))
            elif not follows:
                kept[stage].add(m)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) and not halved:
            kept[stage].discard(m)
    return again


def _recomputes(remat: Remat, micro_batch: int | None, kept: int) -> bool:
    match remat:
        case int():
            return kept >= remat
        case "always" | "never":
            return remat == "always"
        case "except_last":
            return micro_batch != 0


def place_transfers(program: Program) -> Program:
    """Puts a SEND behind whatever makes a value that another rank needs, and the RECEIVE among the peer's actions.

    The sender places both while the program is walked in one legal order, so two ranks list their messages alike.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = place_transfers(Program.of(fill_drain(stages=2, micro_batches=1), micro_batches=1))
    >>> print(*program.rows[0])
    0F0 0SEND0@x:0>1 0RECEIVE0@x:0>1 0B0
    """
    rows: list[list[Action]] = [[] for _ in program.rows]
    for rank, _, action in linearize(program):
        rows[rank].append(action)
        for route in feeds(action, program):
            send = Action(Kind.SEND, action.stage, action.micro_batch, route)
            receiver = receiver_of(send)
            if program.rank_of[receiver] != rank:
                rows[rank].append(send)
                receive = Action(Kind.RECEIVE, receiver, send.micro_batch, send.route)
                rows[program.rank_of[receiver]].append(receive)
    return program.with_rows(rows)


def place_commits(program: Program, stages: Collection[int]) -> Program:
    """Puts COMMIT behind the last forward of each of these stages.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = place_commits(Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2), [0])
    >>> print(*program.rows[0])
    0F0 0F1 0COMMIT 0B0 0B1
    """

    def closed(row: Row) -> Iterator[Action]:
        last = {action.stage: at for at, action in enumerate(row) if action.kind is Kind.FORWARD}
        for at, action in enumerate(row):
            yield action
            if last.get(action.stage) == at and action.stage in stages:
                yield Action(Kind.COMMIT, action.stage)

    return program.with_rows(map(closed, program.rows))


def place_ties(program: Program, stages: Collection[int]) -> Program:
    """Puts TIE of each of these stages behind all that its rank does and sends: behind the last backward, as a rule.

    A TIE waits for all stages that tie, so nothing that one of them could wait for may stand behind it. For
    `place_reduces` to follow.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = place_transfers(Program.of(fill_drain(stages=2, micro_batches=1), micro_batches=1))
    >>> place_ties(program, [0, 1]).around(1, 3)
    '1RECEIVE0@x:0>1 1F0 1B0 >1SEND0@x:0>1< 1TIE'
    """
    trained = {action.stage for action in program.actions if action.kind in BACKWARDS}
    ties = [Action(Kind.TIE, stage) for stage in sorted(trained.intersection(stages))]
    return program.with_rows(
        (*row, *(tie for tie in ties if program.rank_of[tie.stage] == rank)) for rank, row in enumerate(program.rows)
    )


def place_reduces(program: Program, stages: Collection[int]) -> Program:
    """Puts REDUCE behind the TIE of each of these stages, or else behind its last backward and what that sends.

    So it overlaps what other ranks still do, and keeps none of them waiting for its gradient. A rank reduces its
    stages from the last down, those that tie behind the others: in one order in all replicas, though one of fewer
    micro-batches may have another table.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = place_transfers(Program.of(fill_drain(stages=2, micro_batches=1), micro_batches=1))
    >>> place_reduces(place_ties(program, [1]), [0, 1]).around(1, 3)
    '1RECEIVE0@x:0>1 1F0 1B0 >1SEND0@x:0>1< 1TIE 1REDUCE'
    """

    def is_before(action: Action) -> bool:
        return action.kind in _BEFORE_REDUCE or (action.kind is Kind.SEND and action.carries_gradient)

    def closed(row: Row) -> Iterator[Action]:
        last = {action.stage: at for at, action in enumerate(row) if is_before(action) and action.stage in stages}
        ties = {action.stage: at for at, action in enumerate(row) if action.kind is Kind.TIE}
        last |= {stage: max(ties.values()) for stage in ties.keys() & last.keys()}
        order = sorted((Action(Kind.REDUCE, stage) for stage in last), key=partial(closing_order, program))
        places = accumulate((last[reduce.stage] for reduce in order), max)
        behind: dict[int, list[Action]] = {}
        for reduce, at in zip(order, places, strict=True):
            behind.setdefault(at, []).append(reduce)
        for at, action in enumerate(row):
            yield action
            yield from behind.get(at, ())

    return program.with_rows(map(closed, program.rows))


_BEFORE_REDUCE = frozenset({*BACKWARDS, Kind.BACKWARD_WEIGHT, Kind.TIE})


def join_backwards(program: Program, unsplit: Collection[int] = ()) -> Program:
    """Makes one B of I and W at the stages that are not to have it split, and where nobody waits between the two.

    These are an I and its W that stand together, if what I gives goes to no other rank: it would be sent later.

    Args:
        program: Bare rows.
        unsplit: The stages whose backwards are not to be split.

    >>> from gpipe.schedule.action import parse_action
    >>> row = [parse_action(text) for text in "0F0 0F1 0I0 0W0 0I1 0W1".split()]
    >>> print(*join_backwards(Program.of([row], micro_batches=2)).rows[0])
    0F0 0F1 0B0 0B1
    """
    pairs = {
        first
        for row in program.rows
        for first, second in pairwise(row)
        if second == replace(first, kind=Kind.BACKWARD_WEIGHT) and not _crosses(first, program)
    }

    def joined(row: Row) -> Iterator[Action]:
        for action in row:
            is_joined = action.stage in unsplit or replace(action, kind=Kind.BACKWARD_INPUT) in pairs
            if is_joined and action.kind is Kind.BACKWARD_INPUT:
                yield replace(action, kind=Kind.BACKWARD)
            elif not (is_joined and action.kind is Kind.BACKWARD_WEIGHT):
                yield action

    return program.with_rows(map(joined, program.rows))


def _crosses(action: Action, program: Program) -> bool:
    """Whether what an action makes goes to another rank."""
    sends = (Action(Kind.SEND, action.stage, action.micro_batch, route) for route in feeds(action, program))
    return any(program.rank_of[receiver_of(send)] != program.rank_of[action.stage] for send in sends)


def halves(program: Program) -> tuple[Program, Program]:
    """The forwards with their messages and COMMIT, and the rest: for a loss that is computed outside.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> forward, backward = halves(Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2))
    >>> print(*forward.rows[0], "and", *backward.rows[0])
    0F0 0F1 and 0B0 0B1
    """
    forward, backward = [], []
    for row in program.rows:
        ahead = [_is_ahead(action) for action in row]
        forward.append([action for action, first in zip(row, ahead, strict=True) if first])
        backward.append([action for action, first in zip(row, ahead, strict=True) if not first])
    return program.with_rows(forward), program.with_rows(backward)


def _is_ahead(action: Action) -> bool:
    if action.kind in TRANSFERS:
        return not action.carries_gradient
    return action.kind in {Kind.FORWARD, Kind.COMMIT}


def unsplit_stages(program: Program, costs: Costs) -> frozenset[int]:
    """The stages whose backwards had better not be split, by what they cost unsplit and in parts.

    The program has no transfers. Stage after stage is left unsplit if the mini-batch then ends no later, from either
    end.

    >>> from gpipe.schedule.cost import StageCost
    >>> from gpipe.schedule.schedules import SCHEDULES
    >>> program = Program.of(SCHEDULES["zb_h1"].rows((0, 1), 8), micro_batches=8)
    >>> sorted(unsplit_stages(program, [StageCost(1.0, 2.0, 1.05, 1.0)] * 2))
    [0]
    >>> sorted(unsplit_stages(program, [StageCost(1.0, 2.0, 2.0, 2.0)] * 2))
    [0, 1]
    """
    stages = range(program.stages)
    return min(
        (_unsplit(program, costs, order) for order in (stages, stages[::-1])),
        key=lambda unsplit: _seconds(program, costs, unsplit),
    )


def _unsplit(program: Program, costs: Costs, order: range) -> frozenset[int]:
    unsplit: frozenset[int] = frozenset()
    best = _seconds(program, costs, unsplit)
    for stage in order:
        seconds = _seconds(program, costs, unsplit | {stage})
        if seconds <= best:
            unsplit, best = unsplit | {stage}, seconds
    everything = frozenset(order)
    return everything if _seconds(program, costs, everything) <= best else unsplit


def _seconds(program: Program, costs: Costs, unsplit: frozenset[int]) -> float:
    return simulate(join_backwards(program, unsplit), costs).timeline.seconds
