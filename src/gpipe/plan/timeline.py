"""When things happen: written by the simulator and by the recorder alike, so that they can be compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpipe.plan.action import COMPUTE, TRANSFERS, Action, Kind


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from `start` to `end` in seconds since the step began.

    >>> from gpipe.plan.action import parse_action
    >>> Span(0, parse_action("0F0"), start=0.5, end=0.75).seconds
    0.25
    """

    rank: int
    action: Action
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long the action took."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, `seconds` long, over `ranks` ranks.

    `other` holds seconds outside the pipeline that all ranks sat through, by name ("data", "weight update").

    >>> from gpipe.plan.action import parse_action
    >>> timeline = Timeline(2, (Span(0, parse_action("0F0"), 0.0, 1.0), Span(1, parse_action("1F0"), 1.0, 2.0)), 2.0)
    >>> timeline.busy(0), timeline.idle_share()
    (1.0, 0.5)
    """

    ranks: int
    spans: tuple[Span, ...]
    seconds: float
    other: Mapping[str, float] = field(default_factory=dict)

    def busy(self, rank: int) -> float:
        """Seconds that a rank spent computing."""
        return sum(span.seconds for span in self.spans if span.rank == rank and span.action.kind in COMPUTE)

    def idle_share(self) -> float:
        """The share of rank-seconds in which nothing was computed: the bubble of the paper if stages are equal."""
        return 1 - sum(map(self.busy, range(self.ranks))) / (self.ranks * self.seconds)


def bubble(stages: int, micro_batches: int) -> float:
    """The idle share of a fill-drain pipeline of equal stages, (K-1)/(M+K-1) (paper, section 2.3).

    >>> bubble(stages=4, micro_batches=4)
    0.42857142857142855
    """
    return (stages - 1) / (micro_batches + stages - 1)


def merge(timelines: Iterable[Timeline]) -> dict[str, float]:
    """The mean `breakdown` of several steps, weighted by their length.

    >>> merge([Timeline(1, (), 1.0), Timeline(1, (), 3.0, {"data": 4.0})])["data"]
    0.5
    """
    timelines = tuple(timelines)
    total = sum(_whole(timeline) for timeline in timelines)
    shares: dict[str, float] = {}
    for timeline in timelines:
        for name, share in breakdown(timeline).items():
            shares[name] = shares.get(name, 0.0) + share * _whole(timeline) / total
    return shares


def breakdown(timeline: Timeline) -> dict[str, float]:
    """Where the time of all ranks went, as shares that sum to 1 (the paper's Table 4).

    `imbalance` is what the other ranks have less to do than the busiest one; `bubble` is what remains: the time
    in which even the busiest rank waited, once for each rank.

    >>> from gpipe.plan.action import parse_action
    >>> shares = breakdown(Timeline(1, (Span(0, parse_action("0F0"), 0.0, 3.0),), 4.0))
    >>> shares["forward"], shares["bubble"]
    (0.75, 0.25)
    """
    ranks, whole = timeline.ranks, _whole(timeline)
    seconds = {
        "forward": _of_kinds(timeline, {Kind.FORWARD}),
        "recompute": _of_kinds(timeline, {Kind.RECOMPUTE}),
        "backward": _of_kinds(timeline, {Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}),
        "communication": _of_kinds(timeline, TRANSFERS | {Kind.REDUCE, Kind.TIE, Kind.COMMIT}),
    }
    occupied = [sum(s.seconds for s in timeline.spans if s.rank == rank) for rank in range(ranks)]
    seconds["imbalance"] = sum(max(occupied) - own for own in occupied)
    seconds["bubble"] = ranks * (timeline.seconds - max(occupied))
    for name, value in timeline.other.items():
        seconds[name] = seconds.get(name, 0.0) + ranks * value
    return {name: value / (ranks * whole) for name, value in seconds.items()}


def _whole(timeline: Timeline) -> float:
    return timeline.seconds + sum(timeline.other.values())


def _of_kinds(timeline: Timeline, kinds: Iterable[Kind]) -> float:
    kinds = frozenset(kinds)
    return sum(span.seconds for span in timeline.spans if span.action.kind in kinds)
