"""A plan: where the layers are cut, what each rank does, and what that is expected to take."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gpipe.plan.action import Action, Kind
from gpipe.plan.cost import StageCost
from gpipe.plan.partition import Partition
from gpipe.plan.program import Program
from gpipe.plan.simulate import simulate
from gpipe.plan.timeline import Timeline

BACKWARD_OVER_FORWARD = 2.0
"""A backward is taken to last two forwards: where a forward multiplies by a weight once, it does so for the gradient
of the input and for that of the weight."""


@dataclass(frozen=True)
class Plan:
    """What a pipeline will do, and what is foreseen of one mini-batch.

    Attributes:
        partition: The layers of each stage, and what they cost.
        program: What each rank does, in order.
        timeline: When, if each rank has a device or a core of its own and all micro-batches are of one size.
        unit: Of costs and timeline: seconds where costs were measured, else only proportions have a meaning.
        peak_bytes: The most that each stage holds; None if no memory was given to the partitioner.
    """

    partition: Partition
    program: Program
    timeline: Timeline
    unit: Literal["seconds", "relative"]
    peak_bytes: tuple[float, ...] | None

    @property
    def bubble(self) -> float:
        """The share of rank-seconds in which nothing will be computed, the imbalance of the stages included."""
        return self.timeline.idle_share()


def foresee(partition: Partition, program: Program, *, in_seconds: bool = False) -> Plan:
    """Predicts one mini-batch from what each stage costs.

    A cost is that of one micro-batch: a forward, a backward of twice its length, and a recompute as long as the
    forward where every stage recomputes. So a forward is a quarter of the cost, or a third without recompute.

    Args:
        partition: The layers of each stage.
        program: The table of as many stages.
        in_seconds: Whether the costs are seconds.

    Raises:
        ValueError: The program is of another number of stages.

    >>> from gpipe.plan.partition import partition
    >>> from gpipe.plan.schedules import fill_drain
    >>> plan = foresee(partition([3, 3, 6, 6], 2), Program.of(fill_drain(2, 4), micro_batches=4))
    >>> plan.partition.layers, plan.timeline.seconds, round(plan.bubble, 3)
    ((3, 1), 54.0, 0.333)
    """
    if program.stages != len(partition.layers):
        raise ValueError(f"a program of {program.stages} stages for a partition into {len(partition.layers)}")
    timeline = simulate(program, tuple(_stage_costs(partition, program))).timeline
    peak_bytes = partition.bytes if any(partition.bytes) else None
    return Plan(partition, program, timeline, "seconds" if in_seconds else "relative", peak_bytes)


def _stage_costs(partition: Partition, program: Program) -> Iterator[StageCost]:
    everywhere = all(_recomputes(program, stage) for stage in range(program.stages))
    forwards = 1 + BACKWARD_OVER_FORWARD + everywhere
    costs = partition.seconds if any(partition.seconds) else partition.layers  # costs of zero count as equal
    for cost in costs:
        yield StageCost(forward=cost / forwards, backward=BACKWARD_OVER_FORWARD * cost / forwards)


def _recomputes(program: Program, stage: int) -> bool:
    return any(Action(Kind.RECOMPUTE, stage, m) in program.actions for m in range(program.micro_batches))
