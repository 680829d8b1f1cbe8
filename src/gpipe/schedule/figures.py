"""What a schedule costs whatever the layers are: its time, its bubble, and what each rank holds."""

from collections import Counter
from dataclasses import dataclass, replace

from gpipe.schedule.action import Kind
from gpipe.schedule.cost import Costs, StageCost
from gpipe.schedule.program import Program
from gpipe.schedule.rules import BACKWARDS
from gpipe.schedule.simulate import simulate
from gpipe.schedule.timeline import Timeline

UNIT_COST = StageCost(forward=1.0, backward=2.0, backward_input=1.0, backward_weight=1.0)
"""F, I and W take one unit each, and B, which is I and W, two."""


@dataclass(frozen=True)
class Figures:
    """What a mini-batch costs by its schedule.

    Attributes:
        timeline: What is done when.
        work: How long the busiest rank computes.
        peaks: By rank, the most micro-batches that it holds; one at one of its v stages counts as 1/v.
        split: The share of backwards that are split in two.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> found = figures(program_of("zb_h1", ranks=4, micro_batches=8))
    >>> found.seconds, found.work, found.peaks, found.split, round(found.bubble, 3)
    (27.0, 24.0, (4.0, 4.0, 4.0, 4.0), 1.0, 0.111)
    """

    timeline: Timeline
    work: float
    peaks: tuple[float, ...]
    split: float

    @property
    def seconds(self) -> float:
        """From the first action to the end of the last."""
        return self.timeline.seconds

    @property
    def bubble(self) -> float:
        """The share of rank-seconds in which nothing is computed."""
        return self.timeline.idle_share()


def figures(program: Program, costs: Costs | None = None) -> Figures:
    """Times a program of forwards and backwards, and counts what is held; by default a stage costs `UNIT_COST`.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> figures(program_of("1f1b", ranks=2, micro_batches=4)).peaks
    (2.0, 1.0)
    """
    each = [UNIT_COST] * program.stages if costs is None else costs
    held = [replace(cost, boundary=0, inside=1, state=0) for cost in each]
    simulation = simulate(program, held)
    stages = Counter(program.rank_of)
    return Figures(
        timeline=simulation.timeline,
        work=max(map(simulation.timeline.busy, range(program.ranks))),
        peaks=tuple(peak / stages[rank] for rank, peak in enumerate(simulation.peak_bytes)),
        split=_split(program),
    )


def _split(program: Program) -> float:
    kinds = Counter(action.kind for action in program.actions)
    return kinds[Kind.BACKWARD_INPUT] / max(1, sum(kinds[kind] for kind in BACKWARDS))
