from random import Random

import pytest
from hypothesis import given

from gpipe.schedule.action import Action
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.rules import linearize, needs
from gpipe.schedule.schedules import fill_drain
from tests.support.programs import LAW, lowered, lowered_programs, parsed, seeds


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


def test_seeds_reach_different_orders() -> None:
    program = lowered(3, 3)
    assert len({tuple(linearize(program, Random(seed))) for seed in range(20)}) > 10


def test_without_a_seed_the_ranks_keep_in_step() -> None:
    order = [action for _, _, action in linearize(Program.of(fill_drain(2, 3), 3))]
    assert order == parsed("0F0 0F1 1F0 0F2 1F1 1F2 1B0 0B0 1B1 0B1 1B2 0B2")


def program_of(*rows: str, micro_batches: int = 1) -> Program:
    return Program.of([parsed(text) for text in rows], micro_batches)


def test_a_deadlock_says_who_waits_for_what() -> None:
    program = program_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0", micro_batches=2)
    order = linearize(program)
    assert [str(next(order)[2]) for _ in range(2)] == ["0F0", "1F0"]
    with pytest.raises(ScheduleError) as raised:
        next(order)
    assert str(raised.value).splitlines() == [
        "deadlock:",
        "rank 0 waits for 1B0: 0F0 >0B0< 0F1 0B1",
        "rank 1 waits for 0F1: 1F0 >1F1< 1B1 1B0",
    ]


def test_a_deadlock_leaves_out_ranks_that_are_done_and_needs_that_are_met() -> None:
    with pytest.raises(ScheduleError) as raised:
        list(linearize(program_of("0F0", "1B0 1F0")))
    assert str(raised.value).splitlines() == ["deadlock:", "rank 1 waits for 1F0: >1B0< 1F0"]
