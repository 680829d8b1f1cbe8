"""Lanes show what the simulator says, on terminals of any width, with colours and without."""

import re

import pytest

from gpipe.profiling.lanes import (
    IDLE,
    find_ruler,
    fit_ruler,
    lanes,
    lanes_text,
    letter_of,
    margin,
    panel,
)
from gpipe.profiling.svg import nth_stages
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.cost import StageCost
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.simulate import figures
from gpipe.schedule.timeline import Span, Timeline
from tests.support.timelines import pipelined


def timed(name: str, *size: int) -> Timeline:
    return figures(program_of(name, *(size or (4, 8)))).timeline


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_lane_has_the_actions_of_its_rank_in_order_and_idle_time_between(name: str) -> None:
    program = program_of(name, 4, 8)
    timeline = figures(program).timeline
    ruler = find_ruler([timeline])
    nth = nth_stages(timeline)
    for rank, (row, lane) in enumerate(zip(program.table, lanes(timeline, ruler), strict=True)):
        labels = [(letter_of(a.kind, nth[rank, a.stage]), str(a.micro_batch)) for a in row]
        assert re.findall(r"([A-Za-z])(\d+)", lane.plain) == labels
        idle = sum(piece.end - piece.start for piece in lane.spans if piece.style == IDLE)
        assert idle == ruler.column(timeline.seconds - timeline.busy(rank))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("colored", [False, True])
def test_lanes_fill_no_more_than_the_width_and_begin_where_actions_do(name: str, colored: bool) -> None:
    timeline = timed(name)
    least = find_ruler([timeline], 0, colored=colored).columns([timeline])
    for width in (least, least + 1, 2 * least, 5 * least):
        ruler = find_ruler([timeline], width, colored=colored)
        *drawn, axis = panel(timeline, ruler, colored=colored)
        assert all(len(line) <= width for line in drawn)
        assert len(axis) <= width + len("10")
        for rank, lane in enumerate(lanes(timeline, ruler, colored=colored)):
            starts = [piece.start - margin(4) for piece in lane.spans if piece.style != IDLE]
            assert starts == [ruler.column(span.start) for span in timeline.spans if span.rank == rank]


def test_a_wider_terminal_gives_longer_labels() -> None:
    timeline = timed("gpipe", 2, 12)
    shown = {}
    for width in (47, 86, 125, 164):
        ruler = find_ruler([timeline], width)
        shown[ruler.unit] = str(next(panel(timeline, ruler, colored=False)))[8:]
    assert shown[1].startswith("FFFFFFFFFFFF...B B ")
    assert shown[2].startswith("F F F F F F F F F F F F . . . B0- B1- ")
    assert shown[3].startswith("F0 F1 F2 F3 F4 F5 F6 F7 F8 F9 F10F11.. .. .. B0---")
    assert shown[4].startswith("F0  F1  ")


def test_costs_that_are_no_multiples_of_each_other_are_drawn_in_proportion() -> None:
    program = program_of("zb_h1", 3, 5)
    text = lanes_text(program, [StageCost(1.0, 1.97, 1.05, 0.92)] * 3)
    assert text.count("\n") == 2
    for line, row in zip(text.splitlines(), program.table, strict=True):
        assert re.findall(r"[A-Z]\d", line) == [str(action)[1:] for action in row]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_by_a_fitted_ruler_any_timeline_fills_the_width(width: int) -> None:
    tiny = Span(0, Action(Kind.RECOMPUTE, 0, 0), 0.0, 1e-9)
    for timeline in (pipelined(3, 8), pipelined(2, 100), Timeline(1, (tiny,), 1.0)):
        ruler = fit_ruler([timeline], width)
        assert {len(lane) for lane in lanes(timeline, ruler)} == {width}
    assert {piece.style for piece in lanes(timeline, ruler)[0].spans} == {IDLE}


def test_in_a_fitted_lane_what_has_no_room_for_a_label_has_none() -> None:
    spans = [(0.0, 0.5), (0.5, 0.52), (0.52, 1.0)]
    timeline = Timeline(1, tuple(Span(0, Action(Kind.FORWARD, 0, m), *when) for m, when in enumerate(spans)), 1.0)
    (lane,) = lanes(timeline, fit_ruler([timeline], 28))
    assert lane.plain.rstrip() == "rank 0  F0------- F2-------"
