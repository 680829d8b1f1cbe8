from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.plan.action import Action, Kind, Route, parse_action
from gpipe.plan.cost import StageCost
from gpipe.plan.lower import Remat
from gpipe.plan.simulate import simulate
from gpipe.plan.timeline import Span, Timeline, breakdown, bubble, merge
from tests.support.programs import LAW, REMATS, closed, lowered, micro_batch_counts, stage_counts

moments = st.floats(0, 1000)
ACTIONS = [Action(kind, 0, 0, Route(0, 1) if kind in {Kind.SEND, Kind.RECEIVE} else None) for kind in Kind]
OTHERS = ["data", "weight update", "bubble", "forward"]
KINDS = ["forward", "recompute", "backward", "communication"]


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any timeline, whoever wrote it: spans of all kinds, and seconds outside the pipeline."""
    ranks = draw(st.integers(1, 4))
    spans = []
    for _ in range(draw(st.integers(0, 12))):
        start, end = sorted((draw(moments), draw(moments)))
        spans.append(Span(draw(st.integers(0, ranks - 1)), draw(st.sampled_from(ACTIONS)), start, end))
    seconds = max([0.001, *(span.end for span in spans)])
    return Timeline(ranks, tuple(spans), seconds, draw(st.dictionaries(st.sampled_from(OTHERS), moments)))


def total(timeline: Timeline) -> float:
    return timeline.seconds + sum(timeline.other.values())


def close(shares: Mapping[str, float]) -> object:
    return pytest.approx(dict(shares), abs=1e-9)


@LAW
@given(timelines())
def test_the_breakdown_sums_to_1(timeline: Timeline) -> None:
    assert sum(breakdown(timeline).values()) == pytest.approx(1)


@LAW
@given(timelines())
def test_imbalance_and_work_are_never_negative(timeline: Timeline) -> None:
    shares = breakdown(timeline)
    assert all(shares[name] >= -1e-12 for name in [*KINDS, "imbalance"])


@LAW
@given(st.lists(timelines(), max_size=4))
def test_merge_is_the_mean_weighted_by_length(steps: list[Timeline]) -> None:
    names = {name for step in steps for name in breakdown(step)}
    whole = sum(map(total, steps))
    assert merge(steps) == close({n: sum(breakdown(s).get(n, 0) * total(s) for s in steps) / whole for n in names})


@LAW
@given(timelines(), st.integers(1, 5))
def test_merging_equal_steps_changes_nothing(timeline: Timeline, times: int) -> None:
    assert merge([timeline] * times) == close(breakdown(timeline))


@LAW
@given(stage_counts, micro_batch_counts, st.sampled_from(REMATS), st.integers(1, 9), st.integers(1, 9))
def test_equal_stages_have_no_imbalance(k: int, m: int, remat: Remat, f: int, b: int) -> None:
    shares = breakdown(simulate(lowered(k, m, remat), [StageCost(forward=f, backward=b)] * k).timeline)
    assert shares["imbalance"] == 0
    if remat == "never":
        assert shares["bubble"] == pytest.approx(bubble(k, m))


@LAW
@given(stage_counts, micro_batch_counts, st.integers(0, 9), st.integers(0, 9))
def test_closing_actions_count_as_communication(k: int, m: int, tie: int, reduce: int) -> None:
    costs = [StageCost(forward=1, backward=2, tie=tie, reduce=reduce)] * k
    timeline = simulate(closed(lowered(k, m)), costs).timeline
    assert breakdown(timeline)["communication"] * k * timeline.seconds == pytest.approx(k * (tie + reduce))
    assert [timeline.busy(rank) for rank in range(k)] == [m * (1 + 2) + (m if m > 1 else 0)] * k


def span(rank: int, action: str, start: float, end: float) -> Span:
    return Span(rank, parse_action(action), start, end)


STEP = Timeline(
    2,
    (
        span(0, "0F0", 0, 2),
        span(0, "0SEND0@x:0>1", 2, 3),
        span(1, "1F0", 3, 4),
        span(1, "1R0", 4, 5),
        span(1, "1B0", 5, 7),
        span(0, "0I0", 7, 8),
        span(0, "0W0", 8, 10),
        span(0, "0COMMIT", 10, 10),
    ),
    seconds=10,
    other={"data": 1, "weight update": 5},
)


def test_a_step_breaks_down_as_drawn() -> None:
    """32 rank-seconds: 2 ranks, 10 seconds in the pipeline and 6 outside; rank 0 is busy for 6, rank 1 for 4."""
    parts = {
        "forward": 2 + 1,
        "recompute": 1,
        "backward": 2 + 1 + 2,
        "communication": 1,
        "imbalance": 6 - 4,
        "bubble": 2 * (10 - 6),
        "data": 2 * 1,
        "weight update": 2 * 5,
    }
    assert sum(parts.values()) == 32
    assert breakdown(STEP) == close({name: part / 32 for name, part in parts.items()})


def test_busy_counts_layers_and_idle_the_rest() -> None:
    assert [STEP.busy(0), STEP.busy(1)] == [5, 4]
    assert STEP.idle_share() == pytest.approx(1 - 9 / 20)


def test_a_longer_step_weighs_more() -> None:
    short = Timeline(1, (span(0, "0F0", 0, 1),), seconds=1)
    long = Timeline(1, (span(0, "0B0", 0, 3),), seconds=3)
    shares = merge([short, long])
    assert (shares["forward"], shares["backward"]) == (0.25, 0.75)


def test_no_steps_merge_to_nothing() -> None:
    assert merge([]) == {}


def test_one_stage_has_no_bubble_and_one_micro_batch_leaves_one_rank_of_k_busy() -> None:
    for k in range(1, 9):
        assert bubble(1, k) == 0
        assert bubble(k, 1) == pytest.approx(1 - 1 / k)


def test_bug_seconds_outside_the_pipeline_add_to_a_part_of_the_same_name() -> None:
    timeline = Timeline(1, (span(0, "0F0", 0, 3),), seconds=3, other={"communication": 1.0, "forward": 4.0})
    shares = breakdown(timeline)
    assert (shares["forward"], shares["communication"]) == (7 / 8, 1 / 8)
