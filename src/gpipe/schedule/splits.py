"""Chooses the stages whose backwards are split in two: those where that ends the mini-batch sooner."""

from gpipe.schedule.cost import Costs
from gpipe.schedule.lower import join_backwards
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import simulate


def stages_left_whole(program: Program, costs: Costs) -> frozenset[int]:
    """The stages whose backwards had better not be split, by what they cost whole and in parts.

    The program has no transfers. Stage after stage is left whole if the mini-batch then ends no later, from either
    end.

    >>> from gpipe.schedule.cost import StageCost
    >>> from gpipe.schedule.schedules import SCHEDULES
    >>> program = Program.of(SCHEDULES["zb_h1"].rows((0, 1), 8), micro_batches=8)
    >>> sorted(stages_left_whole(program, [StageCost(1.0, 2.0, 1.05, 1.0)] * 2))
    [0]
    >>> sorted(stages_left_whole(program, [StageCost(1.0, 2.0, 2.0, 2.0)] * 2))
    [0, 1]
    """
    stages = range(program.stages)
    return min(
        (_left_whole(program, costs, order) for order in (stages, stages[::-1])),
        key=lambda whole: _seconds(program, costs, whole),
    )


def _left_whole(program: Program, costs: Costs, order: range) -> frozenset[int]:
    whole: frozenset[int] = frozenset()
    best = _seconds(program, costs, whole)
    for stage in order:
        seconds = _seconds(program, costs, whole | {stage})
        if seconds <= best:
            whole, best = whole | {stage}, seconds
    everything = frozenset(order)
    return everything if _seconds(program, costs, everything) <= best else whole


def _seconds(program: Program, costs: Costs, whole: frozenset[int]) -> float:
    return simulate(join_backwards(program, whole), costs).timeline.seconds
