"""Schedules: what every one of them gives on every placement, then the pictures."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.plan.action import Kind, Route
from gpipe.plan.cost import unit_costs
from gpipe.plan.laws import check
from gpipe.plan.lower import Remat, place_recompute, place_transfers
from gpipe.plan.program import Program, Rows
from gpipe.plan.schedules import SCHEDULES, Placement, Schedule, fill_drain, forward_only, forward_only_rows
from gpipe.plan.schedules.placement import loop
from gpipe.plan.simulate import simulate
from tests.support.programs import LAW, closed, listed, remats, skips

PAGES = {**{name: schedule.rows for name, schedule in SCHEDULES.items()}, "forward only": forward_only_rows}
TRAINING = {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}


def vee(ranks: int, stages_per_rank: int) -> Placement:
    """Down the ranks and up again: the rank with a stage of the first half has its mirror too."""
    there = tuple(range(ranks))
    return tuple(rank for leg in range(stages_per_rank) for rank in (there if leg % 2 == 0 else there[::-1]))


placements = st.builds(
    lambda place, ranks, stages_per_rank: place(ranks, stages_per_rank),
    st.sampled_from([loop, vee]),
    st.integers(1, 4),
    st.integers(1, 3),
)
each_page = pytest.mark.parametrize("rows", PAGES.values(), ids=PAGES.keys())
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())


def drawn_program(rows: Callable[[Placement, int], Rows], placement: Placement, data: st.DataObject) -> Program:
    micro_batches = data.draw(st.integers(1, 8))
    routes: Sequence[Route] = data.draw(st.just([]) | skips(len(placement)))
    return Program.of(rows(placement, micro_batches), micro_batches, rank_of=placement, skips=routes)


@each_page
@LAW
@given(placements, st.data())
def test_a_schedule_is_lawful_bare_and_as_it_is_run(
    rows: Callable[[Placement, int], Rows], placement: Placement, data: st.DataObject
) -> None:
    program = drawn_program(rows, placement, data)
    check(program)
    remat: list[Remat] = data.draw(remats(program.stages))
    check(closed(place_transfers(place_recompute(program, remat))))


@each_page
@LAW
@given(placements, st.data())
def test_a_schedule_runs_each_forward_once(
    rows: Callable[[Placement, int], Rows], placement: Placement, data: st.DataObject
) -> None:
    program = drawn_program(rows, placement, data)
    forwards = [action for action in listed(program) if action.kind is Kind.FORWARD]
    cells = [(s, m) for s in range(program.stages) for m in range(program.micro_batches)]
    assert sorted((a.stage, a.micro_batch or 0) for a in forwards) == cells


@each_schedule
@LAW
@given(placements, st.data())
def test_a_training_schedule_has_a_backward_for_each_forward(
    schedule: Schedule, placement: Placement, data: st.DataObject
) -> None:
    program = drawn_program(schedule.rows, placement, data)
    ends = {a for a in program.actions if a.kind in TRAINING}
    assert {(a.stage, a.micro_batch) for a in ends} == {(a.stage, a.micro_batch) for a in program.actions}


@each_schedule
@pytest.mark.parametrize("ranks", range(1, 5))
@pytest.mark.parametrize("stages_per_rank", range(1, 4))
def test_a_placement_gives_each_rank_as_many_stages(schedule: Schedule, ranks: int, stages_per_rank: int) -> None:
    placement = schedule.placement(ranks, stages_per_rank)
    assert [placement.count(rank) for rank in range(ranks)] == [stages_per_rank] * ranks


@LAW
@given(placements, st.integers(1, 8))
def test_fill_drain_ends_all_forwards_of_a_rank_before_its_backwards(
    placement: Placement, micro_batches: int
) -> None:
    for row in SCHEDULES["gpipe"].rows(placement, micro_batches):
        kinds = [action.kind for action in row]
        assert kinds == sorted(kinds, key=[Kind.FORWARD, Kind.BACKWARD].index)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_several_stages_a_rank_shorten_fill_and_drain(ranks: int, stages_per_rank: int) -> None:
    micro_batches = 2 * ranks
    stages = ranks * stages_per_rank
    placement = loop(ranks, stages_per_rank)
    rows = SCHEDULES["gpipe"].rows(placement, micro_batches)
    timeline = simulate(Program.of(rows, micro_batches, rank_of=placement), unit_costs(stages)).timeline
    assert timeline.seconds == 2 * (micro_batches * stages_per_rank + ranks - 1)


def picture(rows: Rows) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


def test_fill_drain_goes_forth_in_order_and_back_in_order() -> None:
    assert picture(fill_drain(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_fill_drain_takes_the_oldest_micro_batch_that_has_come() -> None:
    assert picture(SCHEDULES["gpipe"].rows((0, 1, 1, 0), 2)) == [
        "0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1",
        "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
    ]


def test_forward_only_goes_forth_in_order() -> None:
    assert picture(forward_only(2, 3)) == ["0F0 0F1 0F2", "1F0 1F1 1F2"]
