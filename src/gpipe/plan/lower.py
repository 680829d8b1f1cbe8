"""Passes from a bare schedule to a program that can be run: each takes a program and gives a fuller one."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from gpipe.plan.action import TRANSFERS, Action, Kind
from gpipe.plan.order import linearize
from gpipe.plan.program import Program, Row
from gpipe.plan.rules import BACKWARDS, feeds, receiver_of

Remat: TypeAlias = Literal["always", "except_last", "never"]
REMATS: tuple[str, ...] = get_args(Remat)


def place_recompute(program: Program, remat: Sequence[Remat], *, halved: bool = False) -> Program:
    """Puts R before each backward of a stage, by the stage's `remat`; for a program without transfers.

    R stands before the backward and waits for no gradient, so it runs while the gradient is under way. Nothing is
    recomputed where a backward follows its own forward with nothing between: it would keep nothing from growing.
    `"except_last"` keeps what the forward of micro-batch 0 made, whose backward comes first: one inside more.

    Args:
        program: Bare rows.
        remat: Of each stage.
        halved: The program will be cut by `halves`, and between the two anything may happen.

    >>> from gpipe.plan.schedules import fill_drain
    >>> bare = Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2)
    >>> place_recompute(bare, ["except_last"]).around(0, 2)
    '0F0 0F1 >0B0< 0R1 0B1'
    """

    def with_recompute(row: Row) -> Iterator[Action]:
        for before, action in zip((None, *row), row, strict=False):
            again = Action(Kind.RECOMPUTE, action.stage, action.micro_batch)
            follows = not halved and before == replace(again, kind=Kind.FORWARD)
            if action.kind in BACKWARDS and not follows and _recomputes(remat[action.stage], action.micro_batch):
                yield again
            yield action

    return program.with_rows(map(with_recompute, program.rows))


def _recomputes(remat: Remat, micro_batch: int | None) -> bool:
    return remat == "always" or (remat == "except_last" and micro_batch != 0)


def place_transfers(program: Program) -> Program:
    """Puts a SEND behind whatever makes a value that another rank needs, and the peer's RECEIVE in its row.

    The sender places both while the program is walked in one legal order, so two ranks list their messages alike.

    >>> from gpipe.plan.schedules import fill_drain
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

    >>> from gpipe.plan.schedules import fill_drain
    >>> program = place_commits(Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2), [0])
    >>> print(*program.rows[0])
    0F0 0F1 0COMMIT 0B0 0B1
    """
    return _place_behind_last(program, lambda action: action.kind is Kind.FORWARD, Kind.COMMIT, stages)


def place_ties(program: Program, stages: Collection[int]) -> Program:
    """Puts TIE of each of these stages behind all that its rank does and sends: behind the last backward, as a rule.

    A TIE waits for all stages that tie, so nothing that one of them could wait for may stand behind it. For
    `place_reduces` to follow.

    >>> from gpipe.plan.schedules import fill_drain
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

    So it overlaps the drain of the stages before, and keeps none of them waiting for its gradient.

    >>> from gpipe.plan.schedules import fill_drain
    >>> program = place_transfers(Program.of(fill_drain(stages=2, micro_batches=1), micro_batches=1))
    >>> place_reduces(place_ties(program, [1]), [0, 1]).around(1, 3)
    '1RECEIVE0@x:0>1 1F0 1B0 >1SEND0@x:0>1< 1TIE 1REDUCE'
    """

    def is_before(action: Action) -> bool:
        return action.kind in _BEFORE_REDUCE or (action.kind is Kind.SEND and action.carries_gradient)

    return _place_behind_last(program, is_before, Kind.REDUCE, stages)


_BEFORE_REDUCE = frozenset({*BACKWARDS, Kind.BACKWARD_WEIGHT, Kind.TIE})


def _place_behind_last(
    program: Program, is_before: Callable[[Action], bool], closing: Kind, stages: Collection[int]
) -> Program:
    """Puts a closing action behind the last action of each of these stages that it must follow, if there is one."""

    def closed(row: tuple[Action, ...]) -> Iterator[Action]:
        last = {action.stage: at for at, action in enumerate(row) if is_before(action)}
        for at, action in enumerate(row):
            yield action
            if last.get(action.stage) == at and action.stage in stages:
                yield Action(closing, action.stage)

    return program.with_rows(map(closed, program.rows))


def halves(program: Program) -> tuple[Program, Program]:
    """The forwards with their messages and COMMIT, and the rest: for a loss that is computed outside.

    >>> from gpipe.plan.schedules import fill_drain
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
