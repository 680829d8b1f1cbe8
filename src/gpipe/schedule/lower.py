"""Passes from a bare schedule to a program that can be run: each takes a program and gives a fuller one."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import filterfalse
from typing import Literal, TypeAlias, get_args

from gpipe.schedule.action import COMPUTE, TRANSFERS, Action, Kind, nth_backward
from gpipe.schedule.program import Program, RankActions
from gpipe.schedule.rules import BACKWARD_PARTS, BACKWARDS, closing_order, crossing, linearize

RematName: TypeAlias = Literal["always", "except_last", "never", "offload"]
Remat: TypeAlias = RematName | int  # by name; or how many micro-batches keep at once what their forwards made
REMATS: tuple[str, ...] = get_args(RematName)
ByPlace = defaultdict[int, list[Action]]  # by the place of an action in its row, others beside it
LEAST_BETWEEN = 2  # actions of a rank from a forward to its backward, for what it keeps to leave in one


def place_remat(program: Program, remat: Sequence[Remat], *, halved: bool = False) -> Program:
    """Puts what `remat` says of each stage into a bare program: `place_recompute`, and `place_offloads`."""
    offloading = [stage for stage, each in enumerate(remat) if each == "offload"]
    return place_offloads(place_recompute(program, remat, halved=halved), offloading, halved=halved)


def place_recompute(program: Program, remat: Sequence[Remat], *, halved: bool = False) -> Program:
    """Puts R before each backward of a stage, by the stage's `remat`; for a program without transfers.

    R stands before the backward and waits for no gradient, so it runs while the gradient is under way. `recomputed`
    says of which micro-batches. If `halved`, the program will be cut by `halves`, and anything may happen between.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> bare = Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2)
    >>> place_recompute(bare, ["except_last"]).around(0, 2)
    '0F0 0F1 >0B0< 0R1 0B1'
    """

    def place(row: RankActions, ahead: ByPlace, behind: ByPlace) -> None:
        again = recomputed(row, remat, halved=halved, slices=program.slices)
        for at, action in enumerate(row):
            if action.kind in BACKWARDS and (action.stage, action.micro_batch) in again:
                ahead[at].append(action._replace(kind=Kind.RECOMPUTE))

    return _with_more(program, place)


def _with_more(program: Program, place: Callable[[RankActions, ByPlace, ByPlace], None]) -> Program:
    """The program with what `place` puts ahead of the actions of each row, and behind them."""

    def filled(row: RankActions) -> Iterator[Action]:
        ahead, behind = ByPlace(list), ByPlace(list)
        place(row, ahead, behind)
        for at, action in enumerate(row):
            yield from (*ahead[at], action, *behind[at])

    return program.with_table(map(filled, program.table))


def recomputed(
    row: RankActions, remat: Sequence[Remat], *, halved: bool = False, slices: int = 1
) -> set[tuple[int, int | None]]:
    """The stages and micro-batches of a bare row whose forward is run again before their backward.

    Nothing is recomputed where a backward follows its own forward with nothing between: it would keep nothing from
    growing. `"except_last"` keeps what the forward of micro-batch 0 made, whose backward comes first: one inside
    more. A number n keeps what a forward made wherever fewer than n others of its stage are kept just then.
    """
    again: set[tuple[int, int | None]] = set()
    kept: dict[int, set[int | None]] = defaultdict(set)
    for action, after in zip(row, (*row[1:], None), strict=True):
        stage, m = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            follows = not halved and after in [Action(kind, stage, m) for kind in BACKWARDS]
            if not follows and _recomputes(remat[stage], nth_backward(m or 0, slices), len(kept[stage])):
                again.add((stage, m))
            elif not follows:
                kept[stage].add(m)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) and not halved:
            kept[stage].discard(m)
    return again


def _recomputes(remat: Remat, nth: int, kept: int) -> bool:
    if remat == "except_last":
        return nth != 0
    return remat == "always" if isinstance(remat, str) else kept >= remat


def place_offloads(program: Program, stages: Collection[int], *, halved: bool = False) -> Program:
    """Puts OFFLOAD behind the forwards of each of these stages, and FETCH one action ahead of their backwards.

    For a program without transfers. What a forward keeps leaves while its rank does the next action, and comes back
    while it does the one before the backward: with fewer than `LEAST_BETWEEN` between it would never be gone. If
    `halved`, the program will be cut by `halves`, and anything may happen between.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> bare = Program.of(fill_drain(stages=1, micro_batches=4), micro_batches=4)
    >>> print(*place_offloads(bare, [0]).table[0])
    0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0FETCH0 0F3 0OFFLOAD3 0FETCH1 0B0 0FETCH2 0B1 0FETCH3 0B2 0B3
    """

    def place(row: RankActions, ahead: ByPlace, behind: ByPlace) -> None:
        starts: dict[tuple[int, int | None], int] = {}
        for at, action in enumerate(row):
            cell = action.stage, action.micro_batch
            if action.kind is Kind.FORWARD:
                starts[cell] = at
            elif action.kind in BACKWARDS and action.stage in stages:
                start = starts[cell]
                if halved or at - start > LEAST_BETWEEN:
                    behind[start].append(Action(Kind.OFFLOAD, *cell))
                    ahead[max(at - 1, start + 1)].append(Action(Kind.FETCH, *cell))

    return _with_more(program, place)


def place_transfers(program: Program) -> Program:
    """Puts a SEND behind whatever makes a value that another rank needs, and the RECEIVE among the peer's actions.

    The sender places both while the program is walked in one legal order, so two ranks list their messages alike.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = place_transfers(Program.of(fill_drain(stages=2, micro_batches=1), micro_batches=1))
    >>> print(*program.table[0])
    0F0 0SEND0@x:0>1 0RECEIVE0@x:0>1 0B0
    """
    rows: list[list[Action]] = [[] for _ in program.table]
    for rank, _, action in linearize(program):
        rows[rank].append(action)
        for send in crossing(action, program):
            rows[rank].append(send)
            rows[program.rank_of[send.peer.stage]].append(send.peer)
    return program.with_table(rows)


def place_commits(program: Program, stages: Collection[int]) -> Program:
    """Puts COMMIT behind the last forward of each of these stages.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = place_commits(Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2), [0])
    >>> print(*program.table[0])
    0F0 0F1 0COMMIT 0B0 0B1
    """

    def place(row: RankActions, ahead: ByPlace, behind: ByPlace) -> None:
        last = {a.stage: at for at, a in enumerate(row) if a.kind is Kind.FORWARD and a.stage in stages}
        for stage, at in last.items():
            behind[at].append(Action(Kind.COMMIT, stage))

    return _with_more(program, place)


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
    return program.with_table(
        (*row, *(tie for tie in ties if program.rank_of[tie.stage] == rank)) for rank, row in enumerate(program.table)
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

    def place(row: RankActions, ahead: ByPlace, behind: ByPlace) -> None:
        own = [(at, action) for at, action in enumerate(row) if action.stage in stages]
        last = {a.stage: at for at, a in own if a.kind in BACKWARD_PARTS or a.carries_gradient}
        ties = {a.stage: at for at, a in enumerate(row) if a.kind is Kind.TIE}
        last |= dict.fromkeys(ties.keys() & last.keys(), max(ties.values(), default=0))
        until = 0
        for reduce in sorted((Action(Kind.REDUCE, stage) for stage in last), key=partial(closing_order, program)):
            until = max(until, last[reduce.stage])
            behind[until].append(reduce)

    return _with_more(program, place)


def place_shards(program: Program, stages: Collection[int]) -> Program:
    """Puts UNSHARD ahead of all that each of these stages computes, and RESHARD behind it.

    So what is sent does not grow with M. UNSHARD stands right behind what its rank computes before, that weights may
    come while it waits for others. Freed meanwhile wherever its rank does something else, a stage would be gathered
    twice in 40 of 124 tables of the schedules that have a name, and no rank would hold less when it holds most.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> print(*place_shards(Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2), [0]).table[0])
    0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD
    """

    def place(row: RankActions, ahead: ByPlace, behind: ByPlace) -> None:
        computes = [at for at, action in enumerate(row) if action.kind in COMPUTE]
        for stage in sorted(stages):
            if own := [nth for nth, at in enumerate(computes) if row[at].stage == stage]:
                ahead[computes[own[0] - 1] + 1 if own[0] else 0].append(Action(Kind.UNSHARD, stage))
                behind[computes[own[-1]]].append(Action(Kind.RESHARD, stage))

    return _with_more(program, place)


def join_backwards(program: Program, unsplit: Collection[int] = ()) -> Program:
    """Makes one B of I and W at the `unsplit` stages of a bare program, and where nobody waits between the two.

    These are an I and its W that stand together, if what I gives goes to no other rank: it would be sent later.
    """

    def joined(row: RankActions) -> Iterator[Action]:
        done = set[Action]()  # the W of those that are joined
        for action, after in zip(row, (*row[1:], None), strict=True):
            own = action._replace(kind=Kind.BACKWARD_WEIGHT)
            together = action.stage in unsplit or (after == own and not any(crossing(action, program)))
            if together and action.kind is Kind.BACKWARD_INPUT:
                done.add(own)
                yield action._replace(kind=Kind.BACKWARD)
            elif action not in done:
                yield action

    return program.with_table(map(joined, program.table))


def halves(program: Program) -> tuple[Program, Program]:
    """The forwards with their messages, OFFLOAD and COMMIT, and the rest: for a loss that is computed outside.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> forward, backward = halves(Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2))
    >>> print(*forward.table[0], "and", *backward.table[0])
    0F0 0F1 and 0B0 0B1
    """

    def is_ahead(action: Action) -> bool:
        if action.kind in TRANSFERS:
            return not action.carries_gradient
        return action.kind in {Kind.FORWARD, Kind.OFFLOAD, Kind.COMMIT}

    forward = program.with_table(filter(is_ahead, row) for row in program.table)
    return forward, program.with_table(filterfalse(is_ahead, row) for row in program.table)
