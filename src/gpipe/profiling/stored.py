"""What is kept of a run as JSON: its report, to be drawn without what made it, and its steps as trace events."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, TypeAlias

from gpipe.schedule.action import NAMES, parse_action
from gpipe.schedule.timeline import Span, Timeline, steps_among

FORMAT = "gpipe report 1"
NAME = "report.json"
"""What the file is called in the folder of a run."""
MOST_RANKS = 4096
"""Ranks: what a file may ask to be drawn."""
LARGEST = 1e18
"""The most seconds or bytes that a file may name."""
SHORTEST = 1e-9
"""Seconds: the shortest step that a file may hold."""
SLACK = 0.01
"""The part of a step by which a span may lie outside of it, since clocks of several hosts differ."""

Setting: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class Report:
    """What is known of a run; whatever is not known is left out.

    Attributes:
        title: One line that says which run this is.
        configuration: Its settings, by name.
        timelines: Its recorded steps, in order.
        predicted: What was predicted of one step, in seconds.
        shares: Where the time of the recorded steps went, by part, in the order to tell them; they sum to 1.
        memory: For each rank the bytes that it held at its peak, by what they were for.
        losses: In order; may be NaN or infinite.
        loss_each: What one loss is of.
        sentence: What holds the run back, and what to change.
        predicted_memory: For each rank the bytes that were predicted of its peak.

    >>> Report("two ranks", losses=(2.5, 0.5)).predicted is None
    True
    """

    title: str
    configuration: Mapping[str, Setting] = field(default_factory=dict)
    timelines: tuple[Timeline, ...] = ()
    predicted: Timeline | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[Mapping[str, int], ...] = ()
    losses: tuple[float, ...] = ()
    loss_each: Literal["step", "epoch"] = "step"
    sentence: str = ""
    predicted_memory: tuple[int, ...] = ()

    @property
    def typical(self) -> int:
        """The number, from 0, of the recorded step of median length, among the training steps if there are any.

        >>> Report("", timelines=tuple(Timeline(1, (), seconds) for seconds in (1.0, 5.0, 2.0))).typical
        2
        """
        by_length = sorted(steps_among(self.timelines), key=lambda step: step.seconds)
        return self.timelines.index(by_length[len(by_length) // 2])


def report_json(report: Report) -> str:
    r"""Writes a report as JSON, one object.

    Its members are the attributes of `Report`, and `"format": "gpipe report 1"`. A timeline is an object of `ranks`,
    `seconds`, `other` and `spans`; a span a list of its rank, its action as it prints, its start and its end in
    seconds. Numbers that JSON lacks are the strings `"nan"`, `"inf"` and `"-inf"`. A prediction that is not there is
    null.

    >>> text = report_json(Report("two ranks", losses=(2.5, float("inf"))))
    >>> text[:51], read_report(text).losses
    ('{"format": "gpipe report 1", "title": "two ranks", ', (2.5, inf))
    """
    members = {
        "format": FORMAT,
        "title": report.title,
        "configuration": {name: _plain(value) for name, value in report.configuration.items()},
        "sentence": report.sentence,
        "shares": {name: _plain(share) for name, share in report.shares.items()},
        "memory": [dict(parts) for parts in report.memory],
        "predicted_memory": list(report.predicted_memory),
        "losses": [_plain(loss) for loss in report.losses],
        "loss_each": report.loss_each,
        "predicted": None if report.predicted is None else _timeline_members(report.predicted),
        "timelines": [_timeline_members(timeline) for timeline in report.timelines],
    }
    return json.dumps(members, allow_nan=False)


def read_report(text: str) -> Report:
    """Reads a report back, equal to what `report_json` was given.

    Raises:
        ValueError: The text is not such a report, or cannot be drawn: what is wrong with it.

    >>> read_report('{"format": "gpipe report 0"}')
    Traceback (most recent call last):
    ValueError: its format is 'gpipe report 0', and this gpipe reads 'gpipe report 1'
    """
    try:
        members = json.loads(text, parse_constant=_refuse_constant)
        found = members.get("format") if isinstance(members, dict) else None
        if found != FORMAT:
            raise ValueError(f"its format is {found!r}, and this gpipe reads {FORMAT!r}")
        return _read(members)
    except RecursionError:
        raise ValueError("it is nested more deeply than any report") from None
    except KeyError as missing:
        raise ValueError(f"it has no {missing}") from None
    except OverflowError:
        raise ValueError("a number in it is too large") from None
    except (AttributeError, TypeError) as odd:
        raise ValueError(f"a value in it is of another type than it is written with ({odd})") from None


def _read(members: Mapping[str, Any]) -> Report:
    each = members["loss_each"]
    if each not in ("step", "epoch"):
        raise ValueError(f"its loss_each is {each!r}, and a loss is of a 'step' or an 'epoch'")
    memory = tuple({name: _bytes(count) for name, count in parts.items()} for parts in members["memory"])
    predicted_memory = tuple(map(_bytes, members.get("predicted_memory", ())))
    if memory and predicted_memory and len(memory) != len(predicted_memory):
        few = f"{len(predicted_memory)} rank{'s' * (len(predicted_memory) > 1)}"
        raise ValueError(f"it predicts the memory of {few}, and has that of {len(memory)}")
    return Report(
        title=str(members["title"]),
        configuration={name: _setting(value) for name, value in members["configuration"].items()},
        timelines=tuple(map(_timeline, members["timelines"])),
        predicted=None if members["predicted"] is None else _timeline(members["predicted"]),
        shares={name: _amount(share) for name, share in members["shares"].items()},
        memory=memory,
        predicted_memory=predicted_memory,
        losses=tuple(map(float, members["losses"])),
        loss_each=each,
        sentence=str(members["sentence"]),
    )


def _plain(value: Setting) -> Setting:
    """A number that JSON lacks, as text."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _setting(value: object) -> Setting:
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{value!r} in the configuration")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _amount(value: str | float) -> float:
    """A time or a share: finite, and not negative."""
    amount = float(value)
    if not 0 <= amount <= LARGEST:
        raise ValueError(f"a time or share is {amount}")
    return amount


def _bytes(value: int) -> int:
    if not 0 <= int(value) <= LARGEST:
        raise ValueError(f"a rank holds {value} bytes")
    return int(value)


def _timeline_members(timeline: Timeline) -> Mapping[str, object]:
    return {
        "ranks": timeline.ranks,
        "seconds": timeline.seconds,
        "other": dict(timeline.other),
        "spans": [[span.rank, str(span.action), span.start, span.end] for span in timeline.spans],
    }


def _timeline(members: Mapping[str, Any]) -> Timeline:
    ranks, seconds = int(members["ranks"]), _amount(members["seconds"])
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"a timeline of {ranks} ranks; a page draws 1 to {MOST_RANKS}")
    if seconds < SHORTEST:
        raise ValueError(f"a timeline is {seconds} seconds long")
    spans = tuple(_span(span, ranks, seconds) for span in members["spans"])
    return Timeline(ranks, spans, seconds, {name: _amount(some) for name, some in members["other"].items()})


def _span(members: Sequence[Any], ranks: int, seconds: float) -> Span:
    rank, action, start, end = members
    action, start, end = parse_action(action), float(start), float(end)
    if not 0 <= rank < ranks:
        raise ValueError(f"a span is of rank {rank}, and its timeline has {ranks} ranks")
    if not -SLACK * seconds <= start <= end <= (1 + SLACK) * seconds:
        raise ValueError(f"a span lies from {start} to {end} seconds, outside of its step of {seconds}")
    return Span(int(rank), action, start, end)


MICROSECONDS = 1e6  # the unit of trace events


def trace_json(timelines: Iterable[Timeline]) -> str:
    """Writes steps as Chrome trace events, for ui.perfetto.dev: a track for each rank, a slice for each action.

    Slices have the names of the table (`2F0`). What a step spent outside the pipeline follows it on every track.

    >>> trace_json([])
    '{"traceEvents": [], "displayTimeUnit": "ms"}'
    """
    timelines = tuple(timelines)
    ranks = max((timeline.ranks for timeline in timelines), default=0)
    events: list[dict[str, object]] = [track for rank in range(ranks) for track in _track(rank)]
    start = 0.0
    for step, timeline in enumerate(timelines):
        events += (_action(span, step, start) for span in timeline.spans)
        start += timeline.seconds
        for name, seconds in timeline.other.items():
            events += (_slice(rank, name, name, start, seconds, step=step) for rank in range(timeline.ranks))
            start += seconds
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _track(rank: int) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _action(span: Span, step: int, start: float) -> dict[str, object]:
    action = span.action
    about = {"step": step, "stage": action.stage, "micro-batch": action.micro_batch}
    return _slice(span.rank, str(action), NAMES[action.kind], start + span.start, span.seconds, **about)


def _slice(rank: int, name: str, category: str, start: float, seconds: float, **about: object) -> dict[str, object]:
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
