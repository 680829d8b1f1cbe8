"""Timelines in the Chrome trace event format, for ui.perfetto.dev and chrome://tracing."""

import json
from collections.abc import Iterable, Iterator

from gpipe.schedule.action import NAMES
from gpipe.schedule.timeline import Span, Timeline

MICROSECONDS = 1e6  # the unit of the format

Event = dict[str, object]


def trace_json(timelines: Iterable[Timeline]) -> str:
    """Writes steps, one after the other, as trace events: a track for each rank, a slice for each action.

    Slices have the names of the table (`2F0`). What a step spent outside the pipeline follows it on every track.

    >>> trace_json([])
    '{"traceEvents": [], "displayTimeUnit": "ms"}'
    """
    timelines = tuple(timelines)
    ranks = max((timeline.ranks for timeline in timelines), default=0)
    events: list[Event] = [track for rank in range(ranks) for track in _track(rank)]
    start = 0.0
    for step, timeline in enumerate(timelines):
        events += (_action(span, step, start) for span in timeline.spans)
        start += timeline.seconds
        for name, seconds in timeline.other.items():
            events += (_slice(rank, name, name, start, seconds, step=step) for rank in range(timeline.ranks))
            start += seconds
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _track(rank: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _action(span: Span, step: int, start: float) -> Event:
    action = span.action
    about = {"step": step, "stage": action.stage, "micro-batch": action.micro_batch}
    return _slice(span.rank, str(action), NAMES[action.kind], start + span.start, span.seconds, **about)


def _slice(rank: int, name: str, category: str, start: float, seconds: float, **about: object) -> Event:
    return {
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "name": name,
        "cat": category,
        "ts": round(start * MICROSECONDS, 3),
        "dur": round(seconds * MICROSECONDS, 3),
        "args": about,
    }
