"""Schedules: what every one of them gives on every placement, then the pictures."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule.action import Kind, Route
from gpipe.schedule.cost import StageCost
from gpipe.schedule.laws import check
from gpipe.schedule.lower import Remat, place_recompute, place_transfers
from gpipe.schedule.program import Program, Table
from gpipe.schedule.schedules import (
    SCHEDULES,
    Placement,
    forward_only_table,
    table_in_training,
)
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.schedules.writing import loop
from gpipe.schedule.simulate import figures, simulate
from tests.support.placements import there_and_back
from tests.support.programs import LAW, WHOLE, closed, remats, skips

SLICED = tuple(name for name, schedule in SCHEDULES.items() if schedule.sliced is not None)
ONE_STAGE = ("1f1b", "zb_h1", "zb_h2")
V = ("zb_v", "v_half", "v_min", "dualpipe_v")
placements = st.builds(
    lambda place, ranks, stages_per_rank: place(ranks, stages_per_rank),
    st.sampled_from([loop, there_and_back]),
    st.integers(1, 4),
    st.integers(1, 3),
)


def sizes(name: str) -> st.SearchStrategy[tuple[Placement, int]]:
    """A placement that a page has, and a number of micro-batches."""
    each = st.sampled_from([n for n in range(1, 5) if SCHEDULES[name].placement(2, n)])
    placement = st.builds(lambda ranks, each: SCHEDULES[name].placement(ranks, each), st.integers(1, 6), each)
    return st.tuples(placement, st.integers(1, 20))


each_schedule = pytest.mark.parametrize("name", SCHEDULES)


def drawn_program(rows: Table, placement: Placement, micro_batches: int, data: st.DataObject) -> Program:
    routes: Sequence[Route] = data.draw(st.just([]) | skips(len(placement)))
    return Program.of(rows, micro_batches, rank_of=placement, skips=routes)


def check_as_it_is_run(program: Program, data: st.DataObject) -> None:
    check(program)
    remat: list[Remat] = data.draw(remats(program.stages))
    check(closed(place_transfers(place_recompute(program, remat))))


@each_schedule
@LAW
@given(st.data())
def test_a_page_is_lawful_bare_and_as_it_is_run(name: str, data: st.DataObject) -> None:
    placement, micro_batches = data.draw(sizes(name))
    rows = table_in_training(SCHEDULES[name], placement, micro_batches)
    check_as_it_is_run(drawn_program(rows, placement, micro_batches, data), data)


@pytest.mark.parametrize("name", SLICED)
@LAW
@given(st.data())
def test_a_page_is_lawful_in_slices_and_its_bubble_is_that_of_as_many_micro_batches(
    name: str, data: st.DataObject
) -> None:
    placement, micro_batches = data.draw(sizes(name))
    slices = data.draw(st.integers(2, 5))
    micro_batches = min(micro_batches, 6)
    number = micro_batches * slices
    rows = table_in_training(SCHEDULES[name], placement, number, slices)
    program = replace(drawn_program(rows, placement, number, data), slices=slices)
    check_as_it_is_run(program, data)
    assert Program.from_text(program.to_text()) == program
    check(Program.of(forward_only_table(placement, number, slices), number, rank_of=placement, slices=slices))
    if len(set(placement)) == len(placement):  # (K-1)/(MS+K-1)
        ranks = len(placement)
        assert figures(program).bubble == pytest.approx((ranks - 1) / (number + ranks - 1))
        ahead = [min(number, slices + ranks - 1 - rank) / slices for rank in range(ranks)]
        assert figures(program).peaks == tuple(ahead if name == "1f1b" else [micro_batches] * ranks)


@pytest.mark.parametrize("name", SLICED)
def test_slices_go_forward_in_order_and_backward_in_reverse(name: str) -> None:
    program = program_of(name, ranks=2, micro_batches=2, slices=3)
    for row in program.table:
        forwards, backwards = (" ".join(str(a)[1:] for a in row if a.kind is kind) for kind in WHOLE)
        assert forwards == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2"
        assert backwards == "B0.2 B0.1 B0.0 B1.2 B1.1 B1.0"
    wrong = program.with_table([[*row[:-2], row[-1], row[-2]] for row in program.table])
    with pytest.raises(ValueError, match="deadlocks"):
        check(place_transfers(wrong))
    with pytest.raises(ValueError, match=r"1B1\.1 comes after 1B1\.0"):
        check(program.with_table([program.table[0], wrong.table[1]]))


def test_other_schedules_have_no_table_for_slices() -> None:
    for name in set(SCHEDULES) - set(SLICED):
        with pytest.raises(ValueError, match="does not support slices"):
            program_of(name, ranks=2, micro_batches=4, slices=2)


@LAW
@given(placements, st.integers(1, 8), st.data())
def test_fill_drain_is_lawful_on_any_placement(placement: Placement, micro_batches: int, data: st.DataObject) -> None:
    rows = SCHEDULES["gpipe"].table(placement, micro_batches)
    assert rows is not None
    check_as_it_is_run(drawn_program(rows, placement, micro_batches, data), data)


@each_schedule
@LAW
@given(st.data())
def test_each_placement_has_its_forwards_alone(name: str, data: st.DataObject) -> None:
    placement, micro_batches = data.draw(sizes(name))
    program = drawn_program(forward_only_table(placement, micro_batches), placement, micro_batches, data)
    check(place_transfers(program))
    assert {a.kind for a in program.actions} == {Kind.FORWARD}


@each_schedule
@pytest.mark.parametrize("ranks", range(1, 5))
@pytest.mark.parametrize("stages_per_rank", range(1, 4))
def test_a_placement_gives_each_rank_as_many_stages_or_is_none(name: str, ranks: int, stages_per_rank: int) -> None:
    placement = SCHEDULES[name].placement(ranks, stages_per_rank)
    has = {**dict.fromkeys(ONE_STAGE, (1,)), **dict.fromkeys(V, (2,)), "gpipe": (1, 2, 3), "breadth_first": (1, 2, 3)}
    assert (placement is not None) == (stages_per_rank in has.get(name, (2, 3)))
    if placement is not None:
        assert [placement.count(rank) for rank in range(ranks)] == [stages_per_rank] * ranks


def longest_round(ranks: int, micro_batches: int) -> int:
    return -(-micro_batches // (micro_batches // ranks))


EXCESS: dict[str, Callable[[int], float]] = {
    "gpipe": lambda k: 3 * (k - 1),
    "1f1b": lambda k: 3 * (k - 1),
    "interleaved": lambda k: 3 * (k - 1),
    "zb_h1": lambda k: k - 1,
    "zb_h2": lambda k: k - 1,
    "interleaved_zb": lambda k: k - 1,
    "zb_v": lambda k: k - 1,
    "v_half": lambda k: 3.5 * k - 2 if k % 2 == 0 else 3.5 * (k - 1),
    "v_min": lambda k: 4 * k - 3 if k % 3 == 0 else 4 * k - 5,
    "dualpipe_v": lambda k: k - 1,
    "breadth_first": lambda k: 3 * (k - 1),
}
"""By K, how much longer a mini-batch takes than the work of a rank, where F, I and W of a stage take 1, and B 2."""
PEAK: dict[str, Callable[[int, int, int], float]] = {
    "gpipe": lambda k, m, v: m,
    "1f1b": lambda k, m, v: k,
    "interleaved": lambda k, m, v: ((v - 1) * longest_round(k, m) + 2 * k - 1) / v,
    "zb_h1": lambda k, m, v: k,
    "zb_h2": lambda k, m, v: 2 * k - 1,
    "interleaved_zb": lambda k, m, v: ((v - 1) * longest_round(k, m) + k) / v,
    "zb_v": lambda k, m, v: k,
    "v_half": lambda k, m, v: (k + 2) // 2,
    "v_min": lambda k, m, v: (k + 4) // 3,
    "dualpipe_v": lambda k, m, v: k + 0.5,
    "breadth_first": lambda k, m, v: m,
}
"""By K, M and the stages a rank, the micro-batches of a rank's share that it holds at most."""


@each_schedule
@pytest.mark.parametrize("ranks", range(2, 17))
def test_bubble_and_peak_are_those_of_the_formulas(name: str, ranks: int) -> None:
    schedule = SCHEDULES[name]
    for micro_batches in sorted({2 * ranks, 3 * ranks - 1, 64 if ranks in (2, 4, 7, 16) else 2 * ranks + 1}):
        for each in (
            (2, 3) if schedule.stages_per_rank == 2 and name not in V and ranks < 6 else (schedule.stages_per_rank,)
        ):
            placement = schedule.placement(ranks, each)
            assert placement is not None
            rows = schedule.table(placement, micro_batches)
            assert rows is not None
            program = Program.of(rows, micro_batches, rank_of=placement)
            simulation = simulate(program, [StageCost(1, 2, activations=1)] * len(placement))
            assert simulation.timeline.seconds - 3 * micro_batches * each == EXCESS[name](ranks)
            assert max(simulation.peak_bytes) == each * PEAK[name](ranks, micro_batches, each)


def test_breadth_first_runs_each_stage_in_one_period_forward_and_one_backward() -> None:
    for ranks, stages, micro_batches in ((1, 4, 3), (2, 3, 5), (3, 2, 1)):
        for row in program_of("breadth_first", ranks, micro_batches, stages).table:
            periods = [stage for stage, _ in groupby(row, lambda action: action.stage)]
            held = sorted(set(periods))
            assert periods == [*held, *held[-2::-1]]


@pytest.mark.parametrize("ranks", range(2, 17))
def test_no_rank_is_idle_between_its_first_and_last_action_where_the_bubble_is_zero(ranks: int) -> None:
    for name in ("zb_h2", "zb_v"):
        placement = SCHEDULES[name].placement(ranks, SCHEDULES[name].stages_per_rank)
        assert placement is not None
        rows = table_in_training(SCHEDULES[name], placement, 4 * ranks)
        program = Program.of(rows, 4 * ranks, rank_of=placement)
        timeline = simulate(program, [StageCost(1, 2)] * len(placement)).timeline
        for rank in range(ranks):
            spans = [span for span in timeline.spans if span.rank == rank]
            assert spans[-1].end - spans[0].start == timeline.busy(rank)


def test_a_page_without_a_table_of_a_size_gives_way_to_fill_drain() -> None:
    placement = (0, 1, 1, 0)
    schedule = SCHEDULES["dualpipe_v"]
    assert schedule.table(placement, 3) is None
    assert table_in_training(schedule, placement, 3) == SCHEDULES["gpipe"].table(placement, 3)


@LAW
@given(placements, st.integers(1, 8))
def test_fill_drain_ends_all_forwards_of_a_rank_before_its_backwards(
    placement: Placement, micro_batches: int
) -> None:
    for row in table_in_training(SCHEDULES["gpipe"], placement, micro_batches):
        kinds = [action.kind for action in row]
        assert kinds == sorted(kinds, key=[Kind.FORWARD, Kind.BACKWARD].index)
