import json

import pytest

from gpipe.profiling import trace_json
from tests.support.timelines import pipelined


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


def test_steps_follow_one_another_without_overlap() -> None:
    timelines = [pipelined(2, 4), pipelined(2, 2)]
    slices = [e for e in json.loads(trace_json(timelines))["traceEvents"] if e["ph"] == "X"]
    one = timelines[0].seconds + sum(timelines[0].other.values())
    ends = [e["ts"] + e["dur"] for e in slices if e["args"]["step"] == 0]
    starts = [e["ts"] for e in slices if e["args"]["step"] == 1]
    assert max(ends) == pytest.approx(one * 1e6)
    assert min(starts) == pytest.approx(one * 1e6)
