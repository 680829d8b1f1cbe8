"""When things happen: written by the simulator and by the recorder alike, so that they can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpipe.plan.action import COMPUTE, Action, Kind
from gpipe.plan.rules import BACKWARDS


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

    @property
    def is_step(self) -> bool:
        """Whether there are forwards and backwards in it: not of a call, of its backward, or of an evaluation."""
        kinds = {span.action.kind for span in self.spans}
        return Kind.FORWARD in kinds and not kinds.isdisjoint(BACKWARDS)

    def busy(self, rank: int) -> float:
        """Seconds that a rank spent computing."""
        return sum(span.seconds for span in self.spans if span.rank == rank and span.action.kind in COMPUTE)

    def idle_share(self) -> float:
        """The share of rank-seconds in which nothing was computed: the bubble of the paper if stages are equal."""
        return 1 - sum(map(self.busy, range(self.ranks))) / (self.ranks * self.seconds)


def steps_among(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The training steps among runs; all of these where there is none."""
    return [timeline for timeline in timelines if timeline.is_step] or list(timelines)


def bubble(stages: int, micro_batches: int) -> float:
    """The idle share of a fill-drain pipeline of equal stages, (K-1)/(M+K-1) (paper, section 2.3).

    >>> bubble(stages=4, micro_batches=4)
    0.42857142857142855
    """
    return (stages - 1) / (micro_batches + stages - 1)
