"""Foretells a run: a program and costs give a timeline, its bubble, and the peak bytes of each rank."""

from collections.abc import Callable
from dataclasses import dataclass

from gpipe.plan.action import TRANSFERS, Action, Kind
from gpipe.plan.cost import Costs, StageCost, seconds
from gpipe.plan.order import linearize
from gpipe.plan.program import Program
from gpipe.plan.rules import BACKWARDS, needs
from gpipe.plan.timeline import Span, Timeline


@dataclass(frozen=True)
class Simulation:
    """What a run will look like: when, and with how many bytes at the most on each rank."""

    timeline: Timeline
    peak_bytes: tuple[int, ...]


def simulate(program: Program, costs: Costs, duration: Callable[[Action], float] | None = None) -> Simulation:
    """Runs a program on paper: each rank does its row in order, each action as soon as what it needs is done.

    Transfers keep no rank busy; a message arrives `costs[stage].send` seconds after it was sent. `duration`
    replaces the seconds that `costs` gives, by action.

    >>> from gpipe.plan.cost import unit_costs
    >>> from gpipe.plan.schedules import fill_drain
    >>> program = Program.of(fill_drain(stages=4, micro_batches=4), micro_batches=4)
    >>> round(simulate(program, unit_costs(4)).timeline.idle_share(), 6)  # (K-1)/(M+K-1)
    0.428571
    """
    free = [0.0] * program.ranks
    done: dict[Action, float] = {}
    spans = []
    for rank, _, action in linearize(program):
        takes = seconds(action, costs) if duration is None else duration(action)
        ready = max((done[need] for need in needs(action, program)), default=0.0)
        if action.kind in TRANSFERS:
            sent = max(free[rank], ready) if action.kind is Kind.SEND else ready  # a SEND waits for its turn
            done[action] = sent + takes
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
