"""The dependency rule, by generated programs, then rule by rule; and orders that keep it."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given

from gpipe.schedule.action import TRANSFERS, Action, Kind, Route, parse_action
from gpipe.schedule.lower import place_commits, place_reduces, place_ties, place_transfers
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.rules import linearize, needs
from gpipe.schedule.schedules import fill_drain
from tests.support.programs import (
    LAW,
    SPLIT,
    bare_programs,
    listed,
    lowered,
    lowered_programs,
    parsed,
    scattered,
    seeds,
)


def through_transfers(action: Action, program: Program) -> Iterator[Action]:
    for need in needs(action, program):
        if need.kind in TRANSFERS:
            yield from through_transfers(need, program)
        else:
            yield need


@LAW
@given(bare_programs())
def test_a_transfer_stands_for_what_it_carries(bare: Program) -> None:
    program = place_transfers(bare)
    for action in listed(bare):
        assert set(through_transfers(action, program)) == set(needs(action, bare))


@LAW
@given(lowered_programs())
def test_what_an_action_needs_is_there_once_and_of_its_rank_but_for_messages_and_ties(program: Program) -> None:
    tied = {a.stage for a in listed(program) if a.kind is Kind.TIE}
    backwards = {Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    for action in listed(program):
        found = needs(action, program)
        assert set(found) <= program.actions - {action}
        assert len(set(found)) == len(found)
        if action.kind is Kind.TIE:
            assert set(found) == {a for a in program.actions if a.kind in backwards and a.stage in tied}
        else:
            away = [need for need in found if program.rank_of[need.stage] != program.rank_of[action.stage]]
            assert all(need.kind is Kind.SEND and action.kind is Kind.RECEIVE for need in away)


def found(text: str, program: Program) -> list[str]:
    return [str(need) for need in needs(parse_action(text), program)]


BARE = Program.of(fill_drain(3, 2), 2, skips=[Route(0, 2, "e0")])
LOWERED = place_commits(lowered(3, 2, skips=[Route(0, 2, "e0")]), range(3))


def test_a_forward_follows_its_routes_and_a_backward_goes_against_them() -> None:
    for action, bare, sent in (
        ("0F1", "", ""),
        ("1F1", "0F1", "1RECEIVE1@x:0>1"),
        ("2F1", "1F1 0F1", "2RECEIVE1@x:1>2 2RECEIVE1@e0:0>2"),
        ("2B1", "2F1", "2R1"),
        ("1B1", "1F1 2B1", "1R1 1RECEIVE1@x:1>2"),
        ("0B1", "0F1 1B1 2B1", "0R1 0RECEIVE1@x:0>1 0RECEIVE1@e0:0>2"),
    ):
        assert (found(action, BARE), found(action, LOWERED)) == (bare.split(), sent.split())


def test_a_recompute_a_transfer_and_a_closing_action_need_their_own_stage() -> None:
    for action, expected in (
        ("1R0", "1F0"),
        ("0SEND0@x:0>1", "0F0"),
        ("1SEND0@x:0>1", "1B0"),
        ("1RECEIVE0@x:0>1", "0SEND0@x:0>1"),
        ("0RECEIVE0@e0:0>2", "2SEND0@e0:0>2"),
        ("2COMMIT", "2F0 2F1"),
        ("2REDUCE", "2B0 2B1"),
        ("2TIE", "2B0 2B1"),
    ):
        assert found(action, LOWERED) == expected.split()


def test_a_gradient_leaves_when_the_inputs_have_it_and_before_the_weights() -> None:
    program = scattered(2, 1, SPLIT, ())
    assert found("0I0", program) == ["0F0", "1I0"]
    assert found("0W0", program) == ["0I0"]
    assert found("1SEND0@x:0>1", program) == ["1I0"]
    assert found("0REDUCE", program) == ["0I0", "0W0"]


def test_a_tie_brings_the_gradients_of_the_others_and_a_reduction_follows_it() -> None:
    program = place_reduces(place_ties(LOWERED, [0, 2]), range(3))
    assert found("2TIE", program) == ["0B0", "0B1", "2B0", "2B1"]
    assert found("2REDUCE", program) == ["2B0", "2B1", "2TIE"]
    assert found("1REDUCE", program) == ["1B0", "1B1"]


def test_a_message_has_two_ends() -> None:
    for send, receive in [("0SEND3@e0:0>2", "2RECEIVE3@e0:0>2"), ("2SEND3@e0:0>2", "0RECEIVE3@e0:0>2")]:
        assert (str(parse_action(send).peer), str(parse_action(receive).peer)) == (receive, send)


def test_bug_two_routes_between_two_stages_make_one_need() -> None:
    program = Program.of(fill_drain(2, 1), 1, skips=[Route(0, 1, "e0")])
    assert found("1F0", program) == ["0F0"]
    assert found("0B0", program) == ["0F0", "1B0"]


# Orders that keep it.


def assert_is_legal(order: list[tuple[int, int, Action]], program: Program) -> None:
    done: set[Action] = set()
    places = [0] * program.ranks
    for rank, place, action in order:
        assert place == places[rank]
        assert program.table[rank][place] is action
        assert set(needs(action, program)) <= done
        places[rank] += 1
        done.add(action)
    assert places == [len(row) for row in program.table]


@LAW
@given(lowered_programs(), seeds)
def test_each_action_comes_once_after_its_needs_in_row_order(program: Program, seed: int) -> None:
    assert_is_legal(list(linearize(program)), program)
    assert_is_legal(list(linearize(program, Random(seed))), program)
    assert list(linearize(program, Random(seed))) == list(linearize(program, Random(seed)))


def test_seeds_reach_different_orders_and_without_one_the_ranks_keep_in_step() -> None:
    assert len({tuple(linearize(lowered(3, 3), Random(seed))) for seed in range(20)}) > 10
    order = [action for _, _, action in linearize(Program.of(fill_drain(2, 3), 3))]
    assert order == parsed("0F0 0F1 1F0 0F2 1F1 1F2 1B0 0B0 1B1 0B1 1B2 0B2")


def test_a_deadlock_says_who_waits_for_what() -> None:
    program = Program.of([parsed("0F0 0B0 0F1 0B1"), parsed("1F0 1F1 1B1 1B0")], 2)
    order = linearize(program)
    assert [str(next(order)[2]) for _ in range(2)] == ["0F0", "1F0"]
    with pytest.raises(ScheduleError) as raised:
        next(order)
    assert str(raised.value).splitlines() == [
        "The program deadlocks:",
        "rank 0 waits for 1B0: 0F0 >0B0< 0F1 0B1",
        "rank 1 waits for 0F1: 1F0 >1F1< 1B1 1B0",
    ]
    with pytest.raises(ScheduleError) as raised:  # ranks that are done and needs that are met are left out
        list(linearize(Program.of([parsed("0F0"), parsed("1B0 1F0")], 1)))
    assert str(raised.value).splitlines() == ["The program deadlocks:", "rank 1 waits for 1F0: >1B0< 1F0"]
