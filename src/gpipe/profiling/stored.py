"""What is kept of a run as JSON: its report, to be drawn without what made it, and its steps as trace events."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, Literal, TypeAlias, TypeVar

from gpipe.schedule.action import NAMES, parse_action
from gpipe.schedule.timeline import Span, Timeline, steps_among

FORMAT = "gpipe report 1"
NAME = "report.json"  # what the file is called in the folder of a run
MOST_RANKS = 4096  # ranks: what a file may ask to be drawn
LARGEST = 1e18  # the most seconds or bytes that a file may name
SHORTEST = 1e-9  # seconds: the shortest step that a file may hold
SLACK = 0.01  # the part of a step by which a span may lie outside of it, since clocks of several hosts differ

N = TypeVar("N", int, float)
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
        """The number, from 0, of the recorded step of median length, among the training steps if there are any."""
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
    return json.dumps(_plain({"format": FORMAT, **vars(report)}), allow_nan=False)


def _plain(value: Any) -> Any:
    """A value in what JSON has."""
    match value:
        case Timeline():
            spans = [[span.rank, str(span.action), span.start, span.end] for span in value.spans]
            cut = {"slices": value.slices} if value.slices > 1 else {}
            return {**_plain(vars(value)), "spans": spans, **cut}
        case Mapping():
            return {name: _plain(part) for name, part in value.items()}
        case tuple():
            return [_plain(part) for part in value]
        case float() if not isfinite(value):
            return str(value)
        case _:
            return value


def read_report(text: str) -> Report:
    """Reads a report back, equal to what `report_json` was given.

    Raises:
        ValueError: The text is not such a report, or cannot be drawn: what is wrong with it.

    >>> read_report('{"format": "gpipe report 0"}')
    Traceback (most recent call last):
    ValueError: its format is 'gpipe report 0', and this gpipe reads 'gpipe report 1'
    """
    try:
        members = json.loads(text)
        found = members.get("format") if isinstance(members, dict) else None
        if found != FORMAT:
            raise ValueError(f"its format is {found!r}, and this gpipe reads {FORMAT!r}")
        return _read(members)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as odd:
        why = f"{type(odd).__name__}: {odd}"
        raise ValueError(f"a value in it is missing, or of another type or size than was written ({why})") from None


def _read(members: Mapping[str, Any]) -> Report:
    memory = tuple(_amounts(parts, int) for parts in members["memory"])
    predicted_memory = tuple(_amount(value, int) for value in members.get("predicted_memory", ()))
    if memory and predicted_memory and len(memory) != len(predicted_memory):
        raise ValueError(f"it predicts the memory of {len(predicted_memory)} ranks, and has that of {len(memory)}")
    if members["loss_each"] not in ("step", "epoch"):
        raise ValueError(f"its loss_each is {members['loss_each']!r}, and a loss is of a 'step' or an 'epoch'")
    return Report(
        title=str(members["title"]),
        configuration=dict(members["configuration"]),
        timelines=tuple(map(_timeline, members["timelines"])),
        predicted=None if members["predicted"] is None else _timeline(members["predicted"]),
        shares=_amounts(members["shares"], float),
        memory=memory,
        predicted_memory=predicted_memory,
        losses=tuple(map(float, members["losses"])),
        loss_each=members["loss_each"],
        sentence=str(members["sentence"]),
    )


def _amount(value: Any, kind: type[N]) -> N:
    """A time, share or size: finite, and not negative."""
    amount = kind(value)
    if not 0 <= amount <= LARGEST:
        raise ValueError(f"a time, share or size is {amount}")
    return amount


def _amounts(each: Mapping[str, Any], kind: type[N]) -> dict[str, N]:
    return {name: _amount(value, kind) for name, value in each.items()}


def _timeline(members: Mapping[str, Any]) -> Timeline:
    ranks, seconds = int(members["ranks"]), _amount(members["seconds"], float)
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"a timeline of {ranks} ranks; a page draws 1 to {MOST_RANKS}")
    if seconds < SHORTEST:
        raise ValueError(f"a timeline is {seconds} seconds long")
    parse = partial(parse_action, slices=int(members.get("slices", 1)))
    spans = tuple(Span(int(rank), parse(it), float(a), float(b)) for rank, it, a, b in members["spans"])
    for span in spans:
        if not (0 <= span.rank < ranks and -SLACK * seconds <= span.start <= span.end <= (1 + SLACK) * seconds):
            what = f"a span of rank {span.rank}, from {span.start} to {span.end} seconds"
            raise ValueError(f"{what}, lies outside of its step of {seconds} seconds on {ranks} ranks")
    return Timeline(ranks, spans, seconds, _amounts(members["other"], float))


MICROSECONDS = 1e6  # the unit of trace events


def trace_json(timelines: Iterable[Timeline]) -> str:
    """Writes steps as Chrome trace events, for ui.perfetto.dev: a track for each rank, a slice for each action.

    Slices have the names of the table (`2F0`). What a step spent outside the pipeline follows it on every track.

    >>> trace_json([])
    '{"traceEvents": [], "displayTimeUnit": "ms"}'
    """
    timelines = tuple(timelines)
    events: list[dict[str, object]] = []
    for rank in range(max((timeline.ranks for timeline in timelines), default=0)):
        track = {"ph": "M", "pid": 0, "tid": rank}
        events.append({**track, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events.append({**track, "name": "thread_sort_index", "args": {"sort_index": rank}})

    def note(rank: int, name: str, category: str, start: float, seconds: float, about: Mapping[str, object]) -> None:
        when = {"ts": round(start * MICROSECONDS, 3), "dur": round(seconds * MICROSECONDS, 3)}
        events.append({"ph": "X", "pid": 0, "tid": rank, "name": name, "cat": category, **when, "args": about})

    start = 0.0
    for step, timeline in enumerate(timelines):
        for span in timeline.spans:
            action = span.action
            about = {"step": step, "stage": action.stage, "micro-batch": action.micro_batch}
            note(span.rank, str(action), NAMES[action.kind], start + span.start, span.seconds, about)
        start += timeline.seconds
        for name, seconds in timeline.other.items():
            for rank in range(timeline.ranks):
                note(rank, name, name, start, seconds, {"step": step})
            start += seconds
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
