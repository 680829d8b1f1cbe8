from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.plan.action import TRANSFERS, Action, Kind, Route
from gpipe.plan.laws import check, messages
from gpipe.plan.lower import Remat, halves, place_commits, place_recompute, place_transfers
from gpipe.plan.order import linearize
from gpipe.plan.program import Program
from gpipe.plan.rules import BACKWARDS, needs
from gpipe.plan.schedules import fill_drain
from tests.plan.strategies import LAW, bare_programs, computing, listed, lowered, lowered_programs, remats


@LAW
@given(bare_programs(forward=False), st.data())
def test_a_layer_runs_forward_as_often_as_its_remat_says(bare: Program, data: st.DataObject) -> None:
    remat = data.draw(remats(bare.stages))
    program = place_recompute(bare, remat)
    runs = Counter(a.stage for a in listed(program) if a.kind in {Kind.FORWARD, Kind.RECOMPUTE})
    m = bare.micro_batches
    assert [runs[s] for s in range(bare.stages)] == [
        {"never": m, "except_last": 2 * m - 1, "always": 2 * m}[kind] for kind in remat
    ]


@LAW
@given(lowered_programs())
def test_recompute_stands_right_before_its_backward(program: Program) -> None:
    for row in map(computing, program.rows):
        for at, action in enumerate(row):
            if action.kind is Kind.RECOMPUTE:
                behind = row[at + 1]
                assert behind.kind in BACKWARDS
                assert (behind.stage, behind.micro_batch) == (action.stage, action.micro_batch)


@LAW
@given(lowered_programs())
def test_recompute_waits_for_nothing_of_another_stage(program: Program) -> None:
    for action in listed(program):
        if action.kind is Kind.RECOMPUTE:
            assert needs(action, program) == (Action(Kind.FORWARD, action.stage, action.micro_batch),)


@LAW
@given(bare_programs(forward=False), st.data())
def test_passes_only_add(bare: Program, data: st.DataObject) -> None:
    program = place_recompute(bare, data.draw(remats(bare.stages)))
    assert program.only(set(Kind) - {Kind.RECOMPUTE}) == bare
    sent = place_transfers(program)
    assert sent.only(set(Kind) - TRANSFERS) == program
    assert place_commits(sent, range(bare.stages)).only(set(Kind) - {Kind.COMMIT}) == sent


@LAW
@given(lowered_programs())
def test_a_message_crosses_ranks_behind_what_made_it(program: Program) -> None:
    for rank, row in enumerate(program.rows):
        for at, action in enumerate(row):
            if action.kind is Kind.SEND:
                (made,) = needs(action, program)
                between = row[row.index(made) + 1 : at]
                assert {a.kind for a in between} <= {Kind.SEND, Kind.COMMIT}
                assert {a.stage for a in between} <= {action.stage}
                assert sum(action in messages(program, rank, peer) for peer in range(program.ranks)) == 1


@LAW
@given(lowered_programs())
def test_each_route_that_crosses_ranks_is_taken_once_each_way(program: Program) -> None:
    trains = any(a.kind in BACKWARDS for a in program.actions)
    crossing = [r for r in program.routes if program.rank_of[r.source] != program.rank_of[r.target]]
    sends = Counter(a.route for a in listed(program) if a.kind is Kind.SEND)
    assert sends == dict.fromkeys(crossing, program.micro_batches * (2 if trains else 1))


@LAW
@given(lowered_programs())
def test_two_ranks_list_their_messages_in_one_order(program: Program) -> None:
    for first in range(program.ranks):
        for second in range(program.ranks):
            assert messages(program, first, second) == messages(program, second, first)


@LAW
@given(bare_programs(), st.data())
def test_commit_stands_behind_the_last_forward_of_its_stage(bare: Program, data: st.DataObject) -> None:
    stages = data.draw(st.sets(st.integers(0, bare.stages - 1)))
    program = place_commits(bare, stages)
    commits = [a for a in listed(program) if a.kind is Kind.COMMIT]
    assert sorted(a.stage for a in commits) == sorted(stages)
    for commit in commits:
        row = program.rows[program.rank_of[commit.stage]]
        at = row.index(commit)
        assert row[at - 1].kind is Kind.FORWARD
        assert row[at - 1].stage == commit.stage
        assert all(a.kind is not Kind.FORWARD or a.stage != commit.stage for a in row[at:])


@LAW
@given(lowered_programs())
def test_halves_part_a_program_and_each_can_run(program: Program) -> None:
    forward, backward = halves(program)
    assert not forward.actions & backward.actions
    for row, ahead, behind in zip(program.rows, forward.rows, backward.rows, strict=True):
        assert sorted([*ahead, *behind], key=str) == sorted(row, key=str)
        assert list(ahead) == [a for a in row if a in forward.actions]
        assert list(behind) == [a for a in row if a in backward.actions]
    check(forward)
    for half in (forward, backward):
        assert len(list(linearize(half))) == len(half.actions)
    assert forward.only([Kind.FORWARD]).actions == program.only([Kind.FORWARD]).actions
    assert not backward.only([Kind.FORWARD, Kind.COMMIT]).actions
    for half, gradient in ((forward, False), (backward, True)):
        assert all(a.carries_gradient is gradient for a in half.only(TRANSFERS).actions)


@pytest.mark.parametrize(
    ("remat", "row"),
    [
        ("always", "0F0 0F1 0F2 0R2 0B2 0R1 0B1 0R0 0B0"),
        ("except_last", "0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0"),
        ("never", "0F0 0F1 0F2 0B2 0B1 0B0"),
    ],
)
def test_remat_keeps_all_or_the_last_or_nothing(remat: Remat, row: str) -> None:
    assert " ".join(map(str, lowered(1, 3, remat).rows[0])) == row


def rows_of(program: Program) -> Sequence[str]:
    return [" ".join(map(str, row)) for row in program.rows]


def test_the_sender_places_both_ends() -> None:
    assert rows_of(lowered(2, 1, "never")) == [
        "0F0 0SEND0@x:0>1 0RECEIVE0@x:0>1 0B0",
        "1RECEIVE0@x:0>1 1F0 1B0 1SEND0@x:0>1",
    ]


def test_a_skip_goes_straight_to_its_rank() -> None:
    program = lowered(3, 1, "never", skips=[Route(0, 2, "e0")])
    assert "e0" not in program.to_text().splitlines()[4]
    assert rows_of(program)[0] == ("0F0 0SEND0@x:0>1 0SEND0@e0:0>2 0RECEIVE0@e0:0>2 0RECEIVE0@x:0>1 0B0")


def test_stages_of_one_rank_send_nothing_to_each_other() -> None:
    ahead, behind = fill_drain(2, 1)
    bare = Program.of([[ahead[0], *behind, ahead[1]]], 1, rank_of=[0, 0])
    assert place_transfers(bare) == bare


def test_a_stage_commits_before_its_message_leaves() -> None:
    assert place_commits(lowered(2, 1, "never"), [0]).around(0, 1) == (
        "0F0 >0COMMIT< 0SEND0@x:0>1 0RECEIVE0@x:0>1 0B0"
    )
