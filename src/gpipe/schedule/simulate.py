"""Predicts a mini-batch from a program and costs: its timeline, its bubble, and the peak bytes of each rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gpipe.schedule.action import TRANSFERS, Action, Kind
from gpipe.schedule.cost import Costs, StageCost, seconds
from gpipe.schedule.order import linearize
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program
from gpipe.schedule.rules import BACKWARDS, needs, receiver_of
from gpipe.schedule.timeline import Span, Timeline

BACKWARD_OVER_FORWARD = 2.0
"""A backward is taken to last two forwards: where a forward multiplies by a weight once, it does so for the gradient
of the input and for that of the weight."""


@dataclass(frozen=True)
class Simulation:
    """What a run will look like: when, and with how many bytes at the most on each rank.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=2, micro_batches=4), micro_batches=4)
    >>> simulation = simulate(program, [StageCost(forward=1.0, backward=2.0, boundary=10, inside=100)] * 2)
    >>> simulation.timeline.seconds, simulation.peak_bytes
    (15.0, (440, 440))
    """

    timeline: Timeline
    peak_bytes: tuple[int, ...]


def simulate(program: Program, costs: Costs, duration: Callable[[Action], float] | None = None) -> Simulation:
    """Runs a program on paper: each rank does its row in order, each action as soon as what it needs is done.

    Transfers keep no rank busy; a message arrives `costs[stage].send` seconds after it was sent, or after the one
    before it on the same link and in the same direction arrived. `duration` replaces the seconds that `costs` gives,
    by action.

    >>> from gpipe.schedule.cost import unit_costs
    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=4, micro_batches=4), micro_batches=4)
    >>> round(simulate(program, unit_costs(4)).timeline.idle_share(), 6)  # (K-1)/(M+K-1)
    0.428571
    """
    free = [0.0] * program.ranks
    idle = dict[tuple[int, int], float]()  # from when on links are
    done: dict[Action, float] = {}
    spans = []
    for rank, _, action in linearize(program):
        takes = seconds(action, costs) if duration is None else duration(action)
        ready = max((done[need] for need in needs(action, program)), default=0.0)
        if action.kind is Kind.SEND:  # waits for its turn on its rank and its link
            link = rank, program.rank_of[receiver_of(action)]
            done[action] = idle[link] = max(free[rank], ready, idle.get(link, 0.0)) + takes
            continue
        if action.kind in TRANSFERS:
            done[action] = ready + takes
            continue
        start = max(free[rank], ready)
        done[action] = free[rank] = start + takes
        spans.append(Span(rank, action, start, start + takes))
    timeline = Timeline(program.ranks, tuple(spans), max(done.values(), default=0.0))
    return Simulation(timeline, _peak_bytes(program, costs))


def _peak_bytes(program: Program, costs: Costs) -> tuple[int, ...]:
    """The most that each rank holds: its state, boundary tensors in flight, and what forwards keep inside."""
    peaks = []
    for rank, row in enumerate(program.rows):
        held = sum(costs[stage].state for stage, r in enumerate(program.rank_of) if r == rank)
        peak = held
        for action in row:
            cost = costs[action.stage]
            if action.kind is Kind.FORWARD:  # what it makes inside lives at least until it ends
                peak = max(peak, held + cost.boundary + cost.inside)
            if action.kind in BACKWARDS:
                peak = max(peak, held + cost.working)
            held += _kept(action, cost, program)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _kept(action: Action, cost: StageCost, program: Program) -> int:
    """By how much an action changes what its rank holds when it is over."""
    recomputes = Action(Kind.RECOMPUTE, action.stage, action.micro_batch) in program.actions
    trains = any(Action(kind, action.stage, action.micro_batch) in program.actions for kind in BACKWARDS)
    match action.kind:
        case Kind.FORWARD if trains:
            return cost.boundary + (0 if recomputes else cost.inside)
        case Kind.RECOMPUTE:
            return cost.inside
        case Kind.BACKWARD | Kind.BACKWARD_WEIGHT:
            return -cost.boundary - cost.inside
        case _:
            return 0


@dataclass(frozen=True)
class Prediction:
    """What a pipeline will do, and what is foretold of one mini-batch by the costs of its layers.

    Attributes:
        partition: The layers of each stage, and what they cost.
        program: What each rank does, in order.
        timeline: When, if each rank has a device or a core of its own and all micro-batches are of one size.
        unit: Of costs and timeline: seconds where costs were measured, by a plan too; else only proportions have a
            meaning, also of seconds that a plan tells from operations: those are of its devices, not of these.
        peak_bytes: The most that each rank holds; None where no bytes were counted.

    >>> from gpipe.schedule.partition import given
    >>> from gpipe.schedule.schedules import fill_drain
    >>> plan = predict(given([2, 2], costs=[3, 3, 3, 3]), Program.of(fill_drain(2, 4), micro_batches=4))
    >>> plan.timeline.seconds, plan.bubble
    (30.0, 0.19999999999999996)
    """

    partition: Partition
    program: Program
    timeline: Timeline
    unit: Literal["seconds", "relative"]
    peak_bytes: tuple[int, ...] | None

    @property
    def bubble(self) -> float:
        """The share of rank-seconds in which nothing will be computed, the imbalance of the stages included."""
        return self.timeline.idle_share()


def equal_bubble(program: Program) -> float:
    """The share of rank-seconds in which nothing is computed if all stages cost the same, without recompute.

    Of fill-drain with a stage a rank it is the paper's (K-1)/(M+K-1).

    >>> from gpipe.schedule.schedules import fill_drain
    >>> round(equal_bubble(Program.of(fill_drain(stages=4, micro_batches=4), micro_batches=4)), 6)
    0.428571
    """
    bare = program.only({Kind.FORWARD, *BACKWARDS, Kind.BACKWARD_WEIGHT})
    costs = [StageCost(1.0, BACKWARD_OVER_FORWARD)] * program.stages
    return simulate(bare, costs).timeline.idle_share()


def predict(
    partition: Partition,
    program: Program,
    costs: Costs | None = None,
    *,
    in_seconds: bool = False,
    held: Costs | None = None,
) -> Prediction:
    """Predicts one mini-batch from what each stage costs.

    Args:
        partition: The layers of each stage.
        program: The table of as many stages.
        costs: Of the actions of each stage; by default by the rule of `stage_costs`.
        in_seconds: Whether the costs are seconds.
        held: What stages hold, in bytes, where that was counted.

    Raises:
        ValueError: The program is of another number of stages.

    >>> from gpipe.schedule.partition import given
    >>> from gpipe.schedule.schedules import fill_drain
    >>> plan = predict(given([3, 1], [3, 3, 6, 6]), Program.of(fill_drain(2, 4), micro_batches=4))
    >>> plan.partition.layers, plan.timeline.seconds, round(plan.bubble, 3)
    ((3, 1), 54.0, 0.333)
    """
    if program.stages != len(partition.layers):
        raise ValueError(f"a program of {program.stages} stages for a partition into {len(partition.layers)}")
    timeline = simulate(program, stage_costs(partition, program) if costs is None else costs).timeline
    peak_bytes = None if held is None else simulate(program, held).peak_bytes
    return Prediction(partition, program, timeline, "seconds" if in_seconds else "relative", peak_bytes)


def stage_costs(partition: Partition, program: Program) -> tuple[StageCost, ...]:
    """What the actions of each stage cost, where nothing is known but what its layers cost in all.

    Such a cost is that of one micro-batch: a forward, a backward of twice its length, and a recompute as long as the
    forward where every stage recomputes. So a forward is a quarter of the cost, or a third without recompute.
    """
    everywhere = all(_recomputes(program, stage) for stage in range(program.stages))
    costs = partition.seconds if any(partition.seconds) else partition.layers  # costs of zero count as equal
    forwards = 1 + BACKWARD_OVER_FORWARD + everywhere
    return tuple(StageCost(cost / forwards, BACKWARD_OVER_FORWARD * cost / forwards) for cost in costs)


def _recomputes(program: Program, stage: int) -> bool:
    return any(Action(Kind.RECOMPUTE, stage, m) in program.actions for m in range(program.micro_batches))
