"""Defines timelines of steps. Both the simulator and the recorder return timelines, so that they can be compared.

`offsets` aligns timelines from hosts whose clocks differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean
from typing import NamedTuple

from gpipe.schedule.action import COMPUTE, Action, Kind, Slice
from gpipe.schedule.rules import BACKWARDS


class Span(NamedTuple):
    """One action on one rank, from `start` to `end`, in seconds since the step began.

    >>> Span(0, Action(Kind.FORWARD, 0, 0), start=0.5, end=0.75).seconds
    0.25
    """

    rank: int
    action: Action
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The duration of the action."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step.

    Attributes:
        ranks: The number of ranks.
        spans: When each action ran.
        seconds: The duration of the step.
        other: Seconds that all ranks spent outside the pipeline, by name ("data", "weight update").

    >>> from gpipe.schedule.action import parse_action
    >>> timeline = Timeline(2, (Span(0, parse_action("0F0"), 0.0, 1.0), Span(1, parse_action("1F0"), 1.0, 2.0)), 2.0)
    >>> timeline.busy(0), timeline.idle_share()
    (1.0, 0.5)
    >>> timeline
    Timeline(ranks=2, seconds=2, 2 spans, 50.0% idle)
    """

    ranks: int
    spans: tuple[Span, ...]
    seconds: float
    other: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Returns the sizes of the timeline. The attribute `spans` contains the actions."""
        idle = f", {self.idle_share():.1%} idle" if self.ranks * self.seconds else ""
        return f"Timeline(ranks={self.ranks}, seconds={self.seconds:.4g}, {len(self.spans)} spans{idle})"

    @property
    def is_step(self) -> bool:
        """Whether it has both forwards and backwards. A call, the backward of a call, and an evaluation do not."""
        kinds = {span.action.kind for span in self.spans}
        return Kind.FORWARD in kinds and not kinds.isdisjoint(BACKWARDS)

    @property
    def slices(self) -> int:
        """The number of slices of each micro-batch."""
        return next((m.of for span in self.spans if isinstance(m := span.action.micro_batch, Slice)), 1)

    def busy(self, rank: int) -> float:
        """Returns the seconds that a rank spent computing."""
        return sum(span.seconds for span in self.spans if span.rank == rank and span.action.kind in COMPUTE)

    def idle_share(self) -> float:
        """Returns the idle share of all ranks: the bubble of the paper, if stages are equal."""
        return 1 - sum(map(self.busy, range(self.ranks))) / (self.ranks * self.seconds)


def steps_among(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Returns the timelines of training steps, or all timelines if none is a training step."""
    return [timeline for timeline in timelines if timeline.is_step] or list(timelines)


def bubble(stages: int, micro_batches: int) -> float:
    """Returns the idle share of fill-drain with equal stages, (K-1)/(M+K-1) (paper, section 2.3).

    >>> bubble(stages=4, micro_batches=4)
    0.42857142857142855
    """
    return (stages - 1) / (micro_batches + stages - 1)


def offsets(hosts: Sequence[str], timelines: Sequence[Timeline]) -> list[float]:
    """Returns, for each rank, the seconds to add to its times, to convert them to the clock of the host of rank 0.

    A rank computes a value before another rank uses it. So each forward is a lower bound on the difference of two
    clocks, and each backward is an upper bound. The result is the mean of both bounds. The mean is exact if messages
    take equally long in both directions. Ranks without a connection to rank 0 are assumed to begin at the same time
    as rank 0.

    Args:
        hosts: The host of each rank.
        timelines: The timeline of each rank, by the clock of its host.
    """
    known = {hosts[0]: 0.0}
    least = _least_ahead(hosts, timelines)
    pairs = dict.fromkeys([*least, *((b, a) for a, b in least)])
    while reached := next(((a, b) for a, b in pairs if a in known and b not in known), None):
        a, b = reached
        bounds = [sign * least[pair] for pair, sign in (((a, b), 1), ((b, a), -1)) if pair in least]
        known[b] = known[a] + fmean(bounds)
    starts = [min((span.start for span in timeline.spans), default=0.0) for timeline in timelines]
    return [known.get(host, starts[0] - start) for host, start in zip(hosts, starts, strict=True)]


def _least_ahead(hosts: Sequence[str], timelines: Sequence[Timeline]) -> dict[tuple[str, str], float]:
    """Returns, for each pair of hosts with messages, the least time by which the second clock must be put forward."""
    made: dict[tuple[int, Action], tuple[str, Span]] = {}  # by replica and action
    seen: list[set[int]] = []
    for host, timeline in zip(hosts, timelines, strict=True):
        seen.append({span.action.stage for span in timeline.spans})
        made |= {(seen.count(seen[-1]), span.action): (host, span) for span in timeline.spans}
    least: dict[tuple[str, str], float] = {}
    for (replica, action), (host, span) in made.items():
        for need in _sources(action):
            other, before = made.get((replica, need), (host, span))
            if other != host:
                least[other, host] = max(least.get((other, host), -inf), before.end - span.start)
    return least


def _sources(action: Action) -> Iterator[Action]:
    if action.kind is Kind.FORWARD:
        yield Action(Kind.FORWARD, action.stage - 1, action.micro_batch)
    elif action.kind in BACKWARDS:
        yield from (Action(kind, action.stage + 1, action.micro_batch) for kind in BACKWARDS)
