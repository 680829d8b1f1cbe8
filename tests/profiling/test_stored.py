"""A run's report reads back equal from JSON; what is none is refused with what is wrong with it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.profiling import Report, read_report, report_html, report_json, trace_json
from gpipe.schedule.action import CLOSING, SHARDS, Action, Kind, Route
from gpipe.schedule.timeline import Span, Timeline
from tests.support.timelines import full, pipelined

NUMBERS = st.floats(allow_nan=False)
SHARES = st.floats(0, 1e18)
LENGTH = 1e3
SECONDS = st.floats(0, LENGTH)
SMALL = st.integers(0, 4)
ACTIONS = st.one_of(
    st.builds(Action, st.sampled_from(sorted(set(Kind) - CLOSING - SHARDS, key=str)), SMALL, SMALL, st.none()),
    st.builds(Action, st.sampled_from(sorted(CLOSING | SHARDS, key=str)), SMALL, st.none(), st.none()),
    st.builds(Action, st.just(Kind.SEND), SMALL, SMALL, st.builds(Route, SMALL, SMALL, st.sampled_from("xé/"))),
)
TIMELINES = st.builds(
    Timeline,
    st.just(3),
    st.lists(st.builds(Span, st.integers(0, 2), ACTIONS, SECONDS, st.just(LENGTH)), max_size=4).map(tuple),
    st.just(LENGTH),
    st.dictionaries(st.text(), SHARES, max_size=2),
)
REPORTS = st.builds(
    Report,
    st.text(),
    st.dictionaries(st.text(), st.one_of(st.none(), st.booleans(), st.integers(), SHARES, st.text()), max_size=3),
    st.lists(TIMELINES, max_size=2).map(tuple),
    st.none() | TIMELINES,
    st.dictionaries(st.text(), SHARES, max_size=3),
    st.lists(st.dictionaries(st.text(), st.integers(0, 10**18), max_size=2), max_size=3).map(tuple),
    st.lists(NUMBERS, max_size=3).map(tuple),
    st.sampled_from(["step", "epoch"]),
    st.text(),
)


@given(REPORTS)
def test_a_report_reads_back_equal(report: Report) -> None:
    held = tuple(range(len(report.memory)))
    report = replace(report, predicted_memory=held)
    assert read_report(report_json(report)) == report


def test_losses_that_are_no_numbers_are_kept_in_json_that_anybody_reads() -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    text = report_json(Report("", losses=(1.0, float("nan"), float("-inf"))))
    json.loads(text, parse_constant=refuse)
    assert [*map(repr, read_report(text).losses)] == ["1.0", "nan", "-inf"]


WHOLE = json.loads(report_json(full(ranks=2, micro_batches=1, steps=1)))
(STEP,) = WHOLE["timelines"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        (
            "[" * 100_000,
            "A value of the report is missing, or has a wrong type or size (RecursionError",
        ),
        ("[]", "The file is not a report"),
        (json.dumps({"format": "gpipe report 2"}), "format: 'gpipe report 2' is not"),
        (json.dumps({"format": "gpipe report 1"}), "A value of the report is missing, .* (KeyError: 'memory'"),
        (json.dumps(WHOLE | {"loss_each": "year"}), "loss_each: 'year' is neither"),
        (json.dumps(WHOLE | {"timelines": 3}), "A value of the report is missing, or has a wrong type"),
        (json.dumps(WHOLE | {"shares": []}), "A value of the report is missing, or has a wrong type"),
        (json.dumps(WHOLE | {"losses": ["much"]}), "could not convert string to float: 'much'"),
        (json.dumps(WHOLE | {"losses": [10**400]}), "(OverflowError: "),
        (json.dumps(WHOLE | {"predicted_memory": [1]}), "predicted_memory: has 1 ranks, but memory has 2"),
        (json.dumps(WHOLE | {"shares": {"forward": "inf"}}), "A time, share or size is inf"),
        (json.dumps(WHOLE | {"predicted": STEP | {"ranks": 10**9}}), "A timeline has 1000000000 ranks"),
        (json.dumps(WHOLE | {"predicted": STEP | {"seconds": "nan"}}), "A time, share or size is nan"),
        (json.dumps(WHOLE | {"predicted": STEP | {"seconds": 0}}), "A timeline is 0.0 seconds long"),
        (json.dumps(WHOLE | {"predicted": STEP | {"spans": [[5, "0F0", 0, 0.01]]}}), "A span of rank 5, from"),
        (
            json.dumps(WHOLE | {"predicted": STEP | {"spans": [[0, "0F0", 9, 99]]}}),
            "9.0 to 99.0 seconds, is outside",
        ),
        (json.dumps(WHOLE | {"predicted": STEP | {"spans": [[0, "0X0", 0, 0.01]]}}), "'0X0' is not an"),
        (json.dumps(WHOLE | {"predicted": STEP | {"spans": [[0]]}}), "not enough values to unpack"),
    ],
)
def test_what_is_no_report_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        read_report(text)


def test_a_report_in_which_one_value_is_odd_is_refused_or_drawn() -> None:
    odd: list[Any] = [None, True, -1, 0, 10**9, 10**400, 1e308, -1e308, "nan", "inf", "x", [], {}]
    for path in places(WHOLE):
        for value in odd:
            try:
                report = read_report(json.dumps(put(WHOLE, path, value)))
            except ValueError:
                continue
            report_html(report)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside of a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (key,)
        yield from ((key, *path) for path in places(part))


def put(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a value with another one at a path."""
    if not path:
        return value
    copy = whole.copy()
    copy[path[0]] = put(whole[path[0]], path[1:], value)
    return copy


def test_a_track_for_each_rank_and_a_slice_for_each_action() -> None:
    timeline = pipelined(3, 4)
    events = json.loads(trace_json([timeline]))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(timeline.spans) + 2 * 3  # and data, weight update on each rank
    first = slices[0]
    assert (first["name"], first["cat"], first["tid"]) == ("0F0", "forward", 0)
    assert first["args"] == {"step": 0, "stage": 0, "micro-batch": 0}
    assert first["dur"] == pytest.approx(timeline.spans[0].seconds * 1e6)


def test_steps_in_a_trace_follow_one_another_without_overlap() -> None:
    timelines = [pipelined(2, 4), pipelined(2, 2)]
    slices = [e for e in json.loads(trace_json(timelines))["traceEvents"] if e["ph"] == "X"]
    one = timelines[0].seconds + sum(timelines[0].other.values())
    ends = [e["ts"] + e["dur"] for e in slices if e["args"]["step"] == 0]
    starts = [e["ts"] for e in slices if e["args"]["step"] == 1]
    assert max(ends) == pytest.approx(one * 1e6)
    assert min(starts) == pytest.approx(one * 1e6)
