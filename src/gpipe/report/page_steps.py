"""The timelines of a page, as the JSON that its script draws: small, whole numbers, names in a table.

A run of many steps has some of them drawn, so that the page stays one that opens at once.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpipe.plan.action import NAMES, TRANSFERS, Action, Kind
from gpipe.plan.timeline import Timeline
from gpipe.report.colors import is_bright, nth_stages, shade
from gpipe.report.stored import Report

MOST_SPANS = 30_000
"""About 17 characters each: half a megabyte."""
MOST_STEPS = 100
PARTS = 1_000_000
"""Into so many parts a step is divided: times are whole numbers of them. Zoomed in furthest, one is two pixels."""


def drawn_steps(report: Report) -> tuple[int, ...]:
    """The numbers, from 0, of the steps that are drawn: all, or the typical, the slowest, and others evenly between.

    >>> drawn_steps(Report("", timelines=(Timeline(1, (), 1.0), Timeline(1, (), 2.0))))
    (0, 1)
    """
    steps = report.timelines
    longest = max((len(timeline.spans) for timeline in steps), default=0)
    room = max(1, min(MOST_STEPS, MOST_SPANS // max(1, longest)))
    if len(steps) <= room:
        return tuple(range(len(steps)))
    slowest = max(range(len(steps)), key=lambda step: steps[step].seconds)
    others = room - 2
    evenly = (round(at * (len(steps) - 1) / max(1, others - 1)) for at in range(others))
    return tuple(sorted({report.typical, slowest, *evenly} if room > 1 else {report.typical}))


def steps_json(report: Report) -> str:
    """What the script of a page draws.

    `steps` and, if there is a prediction, `predicted` have for each rank a flat list of whole numbers, four for each
    action in the order of time: its place in the table `actions`, its micro-batch or -1, how long after the beginning
    of the one before it begins, and how long it lasts, both in parts of the step.

    >>> from gpipe.plan.action import parse_action
    >>> from gpipe.plan.timeline import Span
    >>> steps_json(Report("", timelines=(Timeline(1, (Span(0, parse_action("0F2"), 0.1, 0.3),), 0.5),)))[11:91]
    '"number":1,"seconds":0.5,"ranks":[{"busy":0.4,"actions":[0,2,200000,400000]}],"o'
    """
    table = ActionTable.of([*report.timelines, *([report.predicted] if report.predicted else [])])
    steps = [
        {"number": step + 1, **_encoded(report.timelines[step], table), "other": dict(report.timelines[step].other)}
        for step in drawn_steps(report)
    ]
    predicted = None if report.predicted is None else _encoded(report.predicted, table)
    members = {"steps": steps, "predicted": predicted, "actions": table.entries, "parts": PARTS}
    return json.dumps(members, separators=(",", ":"), allow_nan=False)


@dataclass
class ActionTable:
    """What actions are, whatever their micro-batch: each is written once."""

    stages: int
    """The most stages of a rank."""
    entries: list[dict[str, object]] = field(default_factory=list)
    _places: dict[tuple[Action, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, timelines: Iterable[Timeline]) -> "ActionTable":
        """An empty table, for these timelines."""
        return cls(1 + max((nth for timeline in timelines for nth in nth_stages(timeline).values()), default=0))

    def place(self, action: Action, nth: int) -> int:
        """Where an action at the n-th stage of its rank stands, which is entered if it is not there."""
        key = (Action(action.kind, action.stage, route=action.route), nth)
        if key not in self._places:
            self._places[key] = len(self.entries)
            color = shade(action.kind, nth, self.stages)
            self.entries.append(
                {
                    "name": NAMES[action.kind],
                    "stage": action.stage,
                    "route": "" if action.route is None else str(action.route),
                    "color": color,
                    "dark": is_bright(color),
                    "thin": action.kind in TRANSFERS,
                }
            )
        return self._places[key]


def _encoded(timeline: Timeline, table: ActionTable) -> dict[str, object]:
    part = timeline.seconds / PARTS
    nth = nth_stages(timeline)
    lanes: list[list[int]] = [[] for _ in range(timeline.ranks)]
    begun = [0] * timeline.ranks
    for span in sorted(timeline.spans, key=lambda span: span.start):
        start, end, action = round(span.start / part), round(span.end / part), span.action
        micro_batch = -1 if action.micro_batch is None else action.micro_batch
        place = table.place(action, nth[span.rank, action.stage])
        lanes[span.rank] += [place, micro_batch, start - begun[span.rank], end - start]
        begun[span.rank] = start
    busy = [round(timeline.busy(rank) / timeline.seconds, 4) for rank in range(timeline.ranks)]
    ranks = [{"busy": share, "actions": lane} for share, lane in zip(busy, lanes, strict=True)]
    return {"seconds": timeline.seconds, "ranks": ranks}


def kinds_in(timelines: Sequence[Timeline]) -> list[Kind]:
    """The kinds that occur, in the order in which they are listed.

    >>> kinds_in([Timeline(1, (), 1.0)])
    []
    """
    found = {span.action.kind for timeline in timelines for span in timeline.spans}
    return [kind for kind in NAMES if kind in found]
