from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule.action import CLOSING, COMPUTE, SHARDS, TRANSFERS, Action, Kind, Route, parse_action
from gpipe.schedule.laws import check
from gpipe.schedule.lower import (
    RematName,
    halves,
    join_backwards,
    place_commits,
    place_recompute,
    place_reduces,
    place_shards,
    place_ties,
    place_transfers,
    recomputed,
)
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.rules import BACKWARDS, linearize, needs
from gpipe.schedule.schedules import forward_only
from tests.support.programs import (
    LAW,
    bare_programs,
    computing,
    listed,
    lowered,
    lowered_programs,
    parsed,
    remats,
)

WEIGHTS = {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}  # what makes gradients of weights


def follow_at_once(bare: Program) -> set[tuple[int, int | None]]:
    """The stages and micro-batches whose backward stands right behind their forward."""
    return {
        (behind.stage, behind.micro_batch)
        for row in bare.table
        for before, behind in pairwise(row)
        if (before.kind, before.stage, before.micro_batch) == (Kind.FORWARD, behind.stage, behind.micro_batch)
        and behind.kind in BACKWARDS
    }


@LAW
@given(bare_programs(forward=False), st.data())
def test_a_layer_runs_forward_as_often_as_its_remat_says(bare: Program, data: st.DataObject) -> None:
    names = st.sampled_from(get_args(RematName))
    remat = data.draw(st.lists(names, min_size=bare.stages, max_size=bare.stages))
    program = place_recompute(bare, remat)
    again = {(a.stage, a.micro_batch) for a in listed(program) if a.kind is Kind.RECOMPUTE}
    m = bare.micro_batches
    wanted = {"except_last": set(range(1, m)), "always": set(range(m)), "offload_inputs": set(range(m))}
    cells = {(s, m) for s, kind in enumerate(remat) for m in wanted.get(kind, ())}
    assert again == cells - follow_at_once(bare)
    assert {
        (a.stage, a.micro_batch)
        for a in listed(place_recompute(bare, remat, halved=True))
        if a.kind is Kind.RECOMPUTE
    } == cells


@LAW
@given(bare_programs(forward=False), st.integers(0, 4))
def test_as_many_insides_are_kept_at_once_as_a_number_says(bare: Program, most: int) -> None:
    follow = follow_at_once(bare)
    for row in bare.table:
        again = recomputed(row, [most] * bare.stages)
        kept: set[tuple[int, int | None]] = set()
        for action in row:
            cell = action.stage, action.micro_batch
            if action.kind is Kind.FORWARD and cell not in follow:
                full = sum(stage == action.stage for stage, _ in kept) == most
                assert full == (cell in again)
                kept |= set() if full else {cell}
            elif action.kind in WEIGHTS:
                kept.discard(cell)
        assert not again & follow
    halved = [
        a.stage for a in listed(place_recompute(bare, [most] * bare.stages, halved=True)) if a.kind is Kind.RECOMPUTE
    ]
    assert all(halved.count(stage) == max(0, bare.micro_batches - most) for stage in range(bare.stages))


@LAW
@given(lowered_programs(sharded=False))
def test_recompute_stands_right_before_its_backward_and_waits_for_nothing_of_another_stage(program: Program) -> None:
    for row in map(computing, program.table):
        for action, behind in pairwise(row):
            if action.kind is Kind.RECOMPUTE:
                assert behind.kind in BACKWARDS
                assert (behind.stage, behind.micro_batch) == (action.stage, action.micro_batch)
                key = action.stage, action.micro_batch
                own = {Action(Kind.FORWARD, *key), Action(Kind.FETCH, *key)} & program.actions
                assert {*needs(action, program)} == own


@LAW
@given(bare_programs(forward=False), st.data())
def test_passes_only_add(bare: Program, data: st.DataObject) -> None:
    program = place_recompute(bare, data.draw(remats(bare.stages)))
    assert program.only(set(Kind) - {Kind.RECOMPUTE}) == bare
    sent = place_transfers(program)
    assert sent.only(set(Kind) - TRANSFERS) == program
    stages = data.draw(st.sets(st.integers(0, bare.stages - 1)))
    for place, kind in ((place_commits, Kind.COMMIT), (place_ties, Kind.TIE), (place_reduces, Kind.REDUCE)):
        closing = place(sent, stages)
        assert closing.only(set(Kind) - {kind}) == sent
        assert sorted(a.stage for a in listed(closing) if a.kind is kind) == sorted(stages)
        sent = closing


@LAW
@given(lowered_programs(sharded=False))
def test_a_message_crosses_ranks_behind_what_made_it(program: Program) -> None:
    for row in program.table:
        for at, action in enumerate(row):
            if action.kind is Kind.SEND:
                (made,) = needs(action, program)
                between = row[row.index(made) + 1 : at]
                assert {a.kind for a in between} <= {Kind.SEND, Kind.COMMIT}
                assert {a.stage for a in between} <= {action.stage}


@LAW
@given(lowered_programs(sharded=False))
def test_each_route_that_crosses_ranks_is_taken_once_each_way(program: Program) -> None:
    trains = any(a.kind in BACKWARDS for a in program.actions)
    crossing = [r for r in program.routes if program.rank_of[r.source] != program.rank_of[r.target]]
    sends = Counter(a.route for a in listed(program) if a.kind is Kind.SEND)
    assert sends == dict.fromkeys(crossing, program.micro_batches * (2 if trains else 1))


@LAW
@given(bare_programs(), st.data())
def test_commit_stands_behind_the_last_forward_of_its_stage(bare: Program, data: st.DataObject) -> None:
    stages = data.draw(st.sets(st.integers(0, bare.stages - 1)))
    program = place_commits(bare, stages)
    commits = [a for a in listed(program) if a.kind is Kind.COMMIT]
    assert sorted(a.stage for a in commits) == sorted(stages)
    for commit in commits:
        row = program.table[program.rank_of[commit.stage]]
        at = row.index(commit)
        assert row[at - 1].kind is Kind.FORWARD
        assert row[at - 1].stage == commit.stage
        assert all(a.kind is not Kind.FORWARD or a.stage != commit.stage for a in row[at:])


@LAW
@given(lowered_programs(sharded=False))
def test_tie_and_reduce_stand_behind_what_they_close_and_reduce_as_early_as_it_may(program: Program) -> None:
    for row in program.table:
        for at, action in enumerate(row):
            if action.kind in {Kind.TIE, Kind.REDUCE}:
                assert {a.kind for a in row[at + 1 :] if a.stage == action.stage} <= {Kind.REDUCE}
            if action.kind is Kind.TIE:  # nothing that another stage could wait for stands behind it
                assert all(a.kind in CLOSING for a in row[at + 1 :])
            if action.kind is Kind.REDUCE:
                reduces = list(takewhile(lambda a: a.kind is Kind.REDUCE, row[at::-1]))  # it waits for later stages
                before = row[at - len(reduces)]
                assert before.kind is Kind.TIE or before.stage in {a.stage for a in reduces}  # ties of all come first
                assert before.kind in {*WEIGHTS, Kind.SEND, Kind.TIE}


@LAW
@given(lowered_programs(sharded=False), st.data())
def test_a_stage_is_gathered_once_around_all_that_it_computes(program: Program, data: st.DataObject) -> None:
    stages = data.draw(st.sets(st.integers(0, program.stages - 1)))
    gathered = place_shards(program, stages)
    assert gathered.only(set(Kind) - SHARDS) == program
    for stage in stages:
        row = gathered.table[gathered.rank_of[stage]]
        first, last = (row.index(Action(kind, stage)) for kind in (Kind.UNSHARD, Kind.RESHARD))
        uses = [at for at, action in enumerate(row) if action.stage == stage and action.kind in COMPUTE]
        assert first < uses[0]
        assert last == uses[-1] + 1 or row[last - 1].kind is Kind.RESHARD
        assert not [a for a in row[first : uses[0]] if a.kind in COMPUTE]
    assert {a.stage for a in listed(gathered) if a.kind in SHARDS} == stages


@LAW
@given(lowered_programs(sharded=False))
def test_halves_part_a_program_and_each_can_run(program: Program) -> None:
    forward, backward = halves(program)
    assert not forward.actions & backward.actions
    for row, ahead, behind in zip(program.table, forward.table, backward.table, strict=True):
        assert sorted([*ahead, *behind], key=str) == sorted(row, key=str)
        assert list(ahead) == [a for a in row if a in forward.actions]
        assert list(behind) == [a for a in row if a in backward.actions]
    check(forward)
    for half in (forward, backward):
        assert len(list(linearize(half))) == len(half.actions)
    assert forward.only([Kind.FORWARD]).actions == program.only([Kind.FORWARD]).actions
    assert not backward.only([Kind.FORWARD, Kind.COMMIT]).actions
    assert not forward.only([Kind.RECOMPUTE, *BACKWARDS, Kind.BACKWARD_WEIGHT, Kind.TIE, Kind.REDUCE]).actions
    for half, gradient in ((forward, False), (backward, True)):
        assert all(a.carries_gradient is gradient for a in half.only(TRANSFERS).actions)


def rows_of(program: Program) -> Sequence[str]:
    return [" ".join(map(str, row)) for row in program.table]


def test_a_skip_goes_straight_to_its_rank() -> None:
    program = lowered(3, 1, "never", skips=[Route(0, 2, "e0")])
    assert "e0" not in program.to_text().splitlines()[4]
    assert rows_of(program)[0] == ("0F0 0SEND0@x:0>1 0SEND0@e0:0>2 0RECEIVE0@e0:0>2 0RECEIVE0@x:0>1 0B0")


def test_a_stage_reduces_while_its_rank_goes_on_with_another_and_ties_when_that_is_done() -> None:
    program = Program.of([parsed("0F0 2F0 2B0 0B0"), parsed("1F0 1B0")], 1, rank_of=[0, 1, 0])
    assert rows_of(place_reduces(program, [0, 1, 2])) == ["0F0 2F0 2B0 2REDUCE 0B0 0REDUCE", "1F0 1B0 1REDUCE"]
    tied = place_reduces(place_ties(program, [1, 2]), [0, 1, 2])
    assert rows_of(tied) == ["0F0 2F0 2B0 0B0 0REDUCE 2TIE 2REDUCE", "1F0 1B0 1TIE 1REDUCE"]


def test_what_is_not_trained_is_neither_tied_nor_reduced() -> None:
    program = Program.of(forward_only(2, 3), 3)
    assert place_reduces(place_ties(program, [0, 1]), [0, 1]) == program


def test_a_tie_that_another_stage_would_wait_for_in_vain_is_a_deadlock() -> None:
    """Rank 0 would wait for the gradients of stage 1, which wait for its own backward of stage 2."""
    program = Program.of([parsed("0F0 2F0 0TIE 2B0 0B0"), parsed("1F0 1B0 1TIE")], 1, rank_of=[0, 1, 0])
    with pytest.raises(ScheduleError, match="rank 0 waits for 0B0, 1B0: "):
        check(program)
    assert place_ties(program.only({Kind.FORWARD, Kind.BACKWARD}), [0, 1]).table[0][-1] == parse_action("0TIE")


def joined(text: str, rank_of: Sequence[int], unsplit: Sequence[int] = ()) -> list[str]:
    rows = [list(map(parse_action, line.split())) for line in text.splitlines()]
    micro_batches = 1 + max(action.micro_batch or 0 for row in rows for action in row)
    program = join_backwards(Program.of(rows, micro_batches, rank_of=rank_of), unsplit)
    check(program)
    return [" ".join(map(str, row)) for row in program.table]


def test_backwards_are_joined_where_nobody_waits_between_their_parts() -> None:
    text = "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1W0 1F1 1I1 1W1"
    assert joined(text, (0, 1)) == ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    assert joined(text, (0, 1), unsplit=[1]) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_backwards_whose_parts_stand_apart_are_joined_where_asked() -> None:
    assert joined("0F0 0F1 0I0 0I1 0W0 0W1", (0,)) == ["0F0 0F1 0I0 0I1 0W0 0W1"]
    assert joined("0F0 0F1 0I0 0I1 0W0 0W1", (0,), unsplit=[0]) == ["0F0 0F1 0B0 0B1"]
