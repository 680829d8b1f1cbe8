"""Where the time of steps went: parts that sum to the wall time, told apart as on paper."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.profiling import percentages
from gpipe.profiling.breakdown import Breakdown, breakdown, replicas_of
from gpipe.schedule.action import parse_action
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat, place_recompute
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.simulate import simulate
from gpipe.schedule.timeline import Span, Timeline, bubble
from tests.support.programs import LAW, REMATS, closed, lowered, micro_batch_counts, stage_counts

seconds = st.floats(0.01, 10)
outside = st.dictionaries(st.sampled_from(["data", "weight update", "host", "between steps"]), st.floats(0, 10))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any schedule of any size, recomputed or not."""
    ranks = draw(st.integers(2, 4))
    program = program_of(draw(st.sampled_from(sorted(SCHEDULES))), ranks, draw(st.integers(2 * ranks, 9)))
    return place_recompute(program, [draw(st.sampled_from(REMATS))] * program.stages)


@st.composite
def steps(draw: st.DrawFn) -> Timeline:
    """Any step: stages of any costs, ranks that begin late, and time outside of the pipeline."""
    program = draw(programs())
    costs = [StageCost(draw(seconds), draw(seconds), send=draw(st.floats(0, 1))) for _ in range(program.stages)]
    timeline = simulate(program, costs).timeline
    late = draw(st.floats(0, 5))
    spans = tuple(span._replace(start=span.start + late, end=span.end + late) for span in timeline.spans)
    return replace(timeline, spans=spans, seconds=timeline.seconds + late, other=draw(outside))


def length(timeline: Timeline) -> float:
    return timeline.seconds + sum(timeline.other.values())


@LAW
@given(steps())
def test_parts_sum_to_the_wall_time_and_none_is_negative(step: Timeline) -> None:
    found = breakdown([step])
    assert found.seconds == pytest.approx(length(step))
    assert sum(found.shares.values()) == pytest.approx(1)
    assert min(found.shares.values()) >= -1e-9
    assert sum(found.bubble.values()) == pytest.approx(found.shares["bubble"])
    assert min(found.bubble.values()) >= -1e-9


@LAW
@given(st.lists(steps(), min_size=1, max_size=3), st.integers(1, 3))
def test_of_several_steps_it_is_the_mean_by_their_length(some: list[Timeline], times: int) -> None:
    some = [step for step in some if step.ranks == some[0].ranks and stages(step) == stages(some[0])]
    whole = sum(map(length, some))
    found, each = breakdown(some * times), [breakdown([step]) for step in some]
    for name, share in found.shares.items():
        parts = (one.shares.get(name, 0.0) * length(step) for one, step in zip(each, some, strict=True))
        assert share == pytest.approx(sum(parts) / whole)


def stages(timeline: Timeline) -> set[int]:
    return {span.action.stage for span in timeline.spans}


@LAW
@given(stage_counts, micro_batch_counts, st.sampled_from(REMATS), st.integers(1, 9), st.integers(1, 9))
def test_equal_stages_have_no_imbalance_and_the_bubble_of_the_paper(
    k: int, m: int, remat: Remat, f: int, b: int
) -> None:
    found = breakdown([simulate(lowered(k, m, remat), [StageCost(forward=f, backward=b)] * k).timeline])
    assert found.shares["imbalance"] == pytest.approx(0, abs=1e-9)
    assert found.shares["late starts"] == pytest.approx(0, abs=1e-9)
    assert found.theory == pytest.approx(bubble(k, m))
    if remat == "never":
        assert found.shares["bubble"] == pytest.approx(bubble(k, m))


@LAW
@given(programs(), st.floats(0.1, 5))
def test_what_begins_late_is_no_bubble(program: Program, late: float) -> None:
    step = simulate(program, [StageCost(1.0, 2.0)] * program.stages).timeline
    spans = tuple(span._replace(start=span.start + late, end=span.end + late) for span in step.spans)
    moved = breakdown([replace(step, spans=spans, seconds=step.seconds + late)])
    assert moved.shares["late starts"] * moved.seconds == pytest.approx(late)
    assert moved.shares["bubble"] * moved.seconds == pytest.approx(breakdown([step]).shares["bubble"] * step.seconds)


@LAW
@given(stage_counts, micro_batch_counts, st.integers(0, 9), st.integers(0, 9))
def test_closing_actions_are_reduction(k: int, m: int, tie: int, reduce: int) -> None:
    costs = [StageCost(forward=1, backward=2, tie=tie, reduce=reduce)] * k
    found = breakdown([simulate(closed(lowered(k, m)), costs).timeline])
    assert found.shares.get("reduction", 0.0) * found.seconds == pytest.approx(tie + reduce)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=10).filter(any))
def test_percentages_sum_to_100_and_are_off_by_less_than_a_tenth(values: list[float]) -> None:
    shares = {str(i): value / sum(values) for i, value in enumerate(values)}
    rounded = percentages(shares)
    assert round(sum(rounded.values()), 6) == 100
    assert all(abs(rounded[name] - 100 * share) < 0.1 + 1e-9 for name, share in shares.items())


def span(rank: int, action: str, start: float, end: float) -> Span:
    return Span(rank, parse_action(action), start, end)


STEP = Timeline(
    2,
    (
        span(0, "0F0", 0, 2),
        span(1, "1RECEIVE0@x:0>1", 2, 3),
        span(1, "1F0", 3, 4),
        span(1, "1R0", 4, 5),
        span(1, "1B0", 5, 7),
        span(0, "0I0", 8, 9),
        span(0, "0W0", 9, 11),
        span(0, "0COMMIT", 11, 11),
    ),
    seconds=11,
    other={"data": 1, "weight update": 4},
)


def test_a_step_breaks_down_as_drawn() -> None:
    """32 rank-seconds: 2 ranks, 11 seconds in the pipeline and 5 outside; 0I0 begins a second late."""
    found = breakdown([STEP])
    parts = {
        "forward": 2 + 1,
        "recompute": 1,
        "backward": 2 + 1 + 2,
        "communication": 1,
        "late starts": 2 * 1,
        "data": 2 * 1,
        "weight update": 2 * 4,
    }
    rest = 32 - sum(parts.values())
    assert {name: found.shares[name] * 32 for name in parts} == pytest.approx(parts)
    assert (found.shares["bubble"] + found.shares["imbalance"]) * 32 == pytest.approx(rest)
    assert found.stage_seconds == (5, 4)
    assert found.busy == (5 / 16, 5 / 16)


def test_replicas_are_told_apart() -> None:
    one = simulate(lowered(2, 3), [StageCost(1.0, 2.0)] * 2).timeline
    other = simulate(lowered(2, 3), [StageCost(1.5, 2.0)] * 2).timeline
    both = Timeline(4, (*one.spans, *(span._replace(rank=span.rank + 2) for span in other.spans)), other.seconds)
    assert [replica.spans for replica in replicas_of(both)] == [one.spans, other.spans]
    found: Breakdown = breakdown([both])
    assert len(found.busy) == 4
    assert sum(found.shares.values()) == pytest.approx(1)


def test_nothing_recorded_is_told() -> None:
    with pytest.raises(ValueError, match="No step was recorded"):
        breakdown([])
