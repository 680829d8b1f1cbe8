"""What a run came to, to be read by a person: kept as JSON beside it, drawn without what made it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gpipe.schedule.action import parse_action
from gpipe.schedule.timeline import Span, Timeline, steps_among

FORMAT = "gpipe report 1"
NAME = "report.json"
"""What the file is called in the folder of a run."""

Setting: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class Report:
    """What is known of a run; whatever is not known is left out.

    Attributes:
        title: One line that says which run this is.
        configuration: What it was told, by name.
        timelines: Its recorded steps, in order.
        predicted: What was foretold of one step, in seconds.
        shares: Where the time of the recorded steps went, by part, in the order to tell them; they sum to 1.
        memory: For each rank the bytes that it held at its peak, by what they were for.
        losses: In order; may be NaN or infinite.
        loss_each: What one loss is of.
        sentence: What holds the run back, and what to change.
        predicted_memory: For each rank the bytes that were foretold of its peak.

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
        ValueError: The text is not such a report: what is wrong with it.

    >>> read_report('{"format": "gpipe report 0"}')
    Traceback (most recent call last):
    ValueError: its format is 'gpipe report 0', and this gpipe reads 'gpipe report 1'
    """
    members = json.loads(text)  # its error is a ValueError that says where
    found = members.get("format") if isinstance(members, dict) else None
    if found != FORMAT:
        raise ValueError(f"its format is {found!r}, and this gpipe reads {FORMAT!r}")
    try:
        return _read(members)
    except KeyError as missing:
        raise ValueError(f"it has no {missing}") from None
    except (AttributeError, TypeError) as odd:
        raise ValueError(f"a value in it is of another type than it is written with ({odd})") from None


def _read(members: Mapping[str, Any]) -> Report:
    each = members["loss_each"]
    if each not in ("step", "epoch"):
        raise ValueError(f"its loss_each is {each!r}, and a loss is of a 'step' or an 'epoch'")
    return Report(
        title=str(members["title"]),
        configuration={name: _setting(value) for name, value in members["configuration"].items()},
        timelines=tuple(_timeline(timeline) for timeline in members["timelines"]),
        predicted=None if members["predicted"] is None else _timeline(members["predicted"]),
        shares={name: float(share) for name, share in members["shares"].items()},
        memory=tuple({name: int(count) for name, count in parts.items()} for parts in members["memory"]),
        predicted_memory=tuple(map(int, members.get("predicted_memory", ()))),
        losses=tuple(map(float, members["losses"])),
        loss_each=each,
        sentence=str(members["sentence"]),
    )


def _plain(value: Setting) -> Setting:
    """A number that JSON lacks, as text."""
    return str(value) if isinstance(value, float) and not abs(value) < float("inf") else value


def _setting(value: object) -> Setting:
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{value!r} in the configuration")


def _timeline_members(timeline: Timeline) -> Mapping[str, object]:
    return {
        "ranks": timeline.ranks,
        "seconds": timeline.seconds,
        "other": dict(timeline.other),
        "spans": [[span.rank, str(span.action), span.start, span.end] for span in timeline.spans],
    }


def _timeline(members: Mapping[str, Any]) -> Timeline:
    ranks = int(members["ranks"])
    spans = tuple(_span(span, ranks) for span in members["spans"])
    other = {name: float(seconds) for name, seconds in members["other"].items()}
    return Timeline(ranks, spans, float(members["seconds"]), other)


def _span(members: Sequence[Any], ranks: int) -> Span:
    rank, action, start, end = members
    if not 0 <= rank < ranks:
        raise ValueError(f"a span is of rank {rank}, and its timeline has {ranks} ranks")
    return Span(int(rank), parse_action(action), float(start), float(end))
