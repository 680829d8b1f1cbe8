"""Reads and writes reports of runs as JSON, and converts recorded steps to trace events."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, Literal, TypeAlias, TypeVar

from gpipe.schedule.action import NAMES, parse_action
from gpipe.schedule.timeline import Span, Timeline, steps_among

FORMAT = "gpipe report 1"
NOT_A_REPORT = (
    "The file is not a report. `Recording.save` writes traces for ui.perfetto.dev. Write a report with "
    "Path('report.json').write_text(gpipe.profiling.report_json(recording.report('title')))."
)
NAME = "report.json"  # the file name in the folder of a run
MAX_RANKS = 4096  # in a file
LARGEST = 1e18  # the largest number of seconds or bytes in a file
SHORTEST = 1e-9  # the shortest step in a file, in seconds
SLACK = 0.01  # A span may exceed its step by this share, because clocks of hosts differ.

N = TypeVar("N", int, float)
Setting: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class Report:
    """The steps, memory, losses and settings of a run. Unknown parts are empty or None.

    Attributes:
        title: One line that names the run.
        configuration: The settings of the run, by name.
        timelines: The recorded steps, in order.
        predicted: The predicted timeline of one step, in seconds.
        shares: For each part of the breakdown, its share of the time, in printing order. The shares sum to 1.
        memory: For each rank, the bytes at the memory peak, by purpose.
        losses: The losses in order. They may be NaN or infinite.
        loss_each: Whether each loss belongs to a step or an epoch.
        sentence: The result of `recording.explain()`: the reason for lost time, and the change that would save time.
        predicted_memory: For each rank, the predicted bytes at the memory peak.
        throughput: The throughput of the training steps, by its name in `Recording.metrics`.

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
    throughput: Mapping[str, float] = field(default_factory=dict)

    @property
    def typical(self) -> int:
        """The index of the recorded step of median length. Evaluation steps count only if no training step exists."""
        by_length = sorted(steps_among(self.timelines), key=lambda step: step.seconds)
        return self.timelines.index(by_length[len(by_length) // 2])


def report_json(report: Report) -> str:
    r"""Converts a report to one JSON object.

    The members of the object are the attributes of `Report`, and `"format": "gpipe report 1"`. A timeline is an
    object with `ranks`, `seconds`, `other` and `spans`. A span is a list of the rank, the action as text, and the
    start and end in seconds. Numbers that JSON does not support are the strings `"nan"`, `"inf"` and `"-inf"`.

    >>> text = report_json(Report("two ranks", losses=(2.5, float("inf"))))
    >>> text[:51], read_report(text).losses
    ('{"format": "gpipe report 1", "title": "two ranks", ', (2.5, inf))
    """
    return json.dumps(_plain({"format": FORMAT, **vars(report)}), allow_nan=False)


def _plain(value: Any) -> Any:
    """Converts a value to JSON types."""
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
    """Converts the output of `report_json` back to an equal report.

    Args:
        text: The output of `report_json`.

    Returns:
        The report. All values are checked, so that the report can be drawn.

    Raises:
        ValueError: If the text is not a report, or if the report cannot be drawn.

    >>> read_report('{"format": "gpipe report 0"}')
    Traceback (most recent call last):
    ValueError: format: 'gpipe report 0' is not 'gpipe report 1'. Use the version of gpipe that wrote the report.
    """
    try:
        members = json.loads(text)
        version = members.get("format") if isinstance(members, dict) else None
        if version is None:
            raise ValueError(NOT_A_REPORT)
        if version != FORMAT:
            raise ValueError(
                f"format: {version!r} is not {FORMAT!r}. Use the version of gpipe that wrote the report."
            )
        return _read(members)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"A value of the report is missing, or has a wrong type or size ({cause}).") from None


def _read(members: Mapping[str, Any]) -> Report:
    memory = tuple(_amounts(parts, int) for parts in members["memory"])
    predicted_memory = tuple(_amount(value, int) for value in members.get("predicted_memory", ()))
    if memory and predicted_memory and len(memory) != len(predicted_memory):
        raise ValueError(f"predicted_memory: has {len(predicted_memory)} ranks, but memory has {len(memory)}.")
    if members["loss_each"] not in ("step", "epoch"):
        raise ValueError(f"loss_each: {members['loss_each']!r} is neither 'step' nor 'epoch'.")
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
        throughput=_amounts(members.get("throughput", {}), float),
    )


def _amount(value: Any, kind: type[N]) -> N:
    """Converts a time, share or size, and checks that it is finite and not negative."""
    amount = kind(value)
    if not 0 <= amount <= LARGEST:
        raise ValueError(f"A time, share or size is {amount}, which is not between 0 and {LARGEST:g}.")
    return amount


def _amounts(each: Mapping[str, Any], kind: type[N]) -> dict[str, N]:
    return {name: _amount(value, kind) for name, value in each.items()}


def _timeline(members: Mapping[str, Any]) -> Timeline:
    ranks, seconds = int(members["ranks"]), _amount(members["seconds"], float)
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"A timeline has {ranks} ranks, which is not between 1 and {MAX_RANKS}.")
    if seconds < SHORTEST:
        raise ValueError(f"A timeline is {seconds} seconds long, which is less than {SHORTEST:g}.")
    parse = partial(parse_action, slices=int(members.get("slices", 1)))
    spans = tuple(Span(int(rank), parse(it), float(a), float(b)) for rank, it, a, b in members["spans"])
    for span in spans:
        if not (0 <= span.rank < ranks and -SLACK * seconds <= span.start <= span.end <= (1 + SLACK) * seconds):
            raise ValueError(
                f"A span of rank {span.rank}, from {span.start} to {span.end} seconds, is outside its step of "
                f"{seconds} seconds on {ranks} ranks."
            )
    return Timeline(ranks, spans, seconds, _amounts(members["other"], float))


MICROSECONDS = 1e6  # the unit of trace events


def trace_json(timelines: Iterable[Timeline]) -> str:
    """Converts steps to Chrome trace events for ui.perfetto.dev, with a track per rank and a slice per action.

    Slices have the names of actions, such as `2F0`. After each step, every track has slices for the time outside the
    pipeline.

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
