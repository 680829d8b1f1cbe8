"""Finds the cuts of a shape with which a mini-batch is fastest.

A shape that is tried with one cut after another: what its stages cost, and how long a mini-batch takes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice, pairwise, permutations
from math import comb
from operator import add, le
from typing import TypeAlias

from gpipe.planner.search.cuts import partition
from gpipe.planner.search.device import Device
from gpipe.planner.search.fitting import Fitting, Levels, Misfit
from gpipe.planner.search.profile import SizedProfile, bounds
from gpipe.planner.search.shapes import Shape
from gpipe.schedule.action import Kind
from gpipe.schedule.cost import StageCost
from gpipe.schedule.partition import Memory, given
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import Simulator


@dataclass(frozen=True)
class Settled:
    """Cuts that fit, with what is recomputed."""

    layers: tuple[int, ...]
    costs: tuple[StageCost, ...]
    levels: Levels
    seconds: float


@dataclass(frozen=True)
class Trial:
    """One shape on its devices, to be cut.

    Attributes:
        shape: What it is.
        program: Its table.
        sized: The layers, for its micro-batches.
        devices: Of its ranks.
        speeds: Of these.
    """

    shape: Shape
    program: Program
    sized: SizedProfile
    devices: Sequence[Device]
    speeds: Sequence[float]

    @cached_property
    def simulator(self) -> Simulator:
        """Of the table and its messages."""
        return Simulator(self.program, messages=True)

    @cached_property
    def stage_speeds(self) -> tuple[float, ...]:
        """Of the devices of its stages."""
        return tuple(self.speeds[rank] for rank in self.program.rank_of)

    @cached_property
    def splits(self) -> bool:
        """Whether some backwards are split in two."""
        return any(action.kind is Kind.BACKWARD_INPUT for action in self.program.actions)

    @cached_property
    def fitting(self) -> Fitting:
        """The table on the devices, for what has to be recomputed."""
        return Fitting(self.simulator, [device.memory for device in self.devices])

    def costs(self, layers: Sequence[int]) -> tuple[StageCost, ...]:
        """What each stage costs, its messages included: these take as long as the slower of two links has it."""
        rank_of, runs = self.program.rank_of, bounds(layers)
        entering = [self.sized.entering(first, end) for first, end in runs]
        under_way = [0.0] * (len(runs) + 1)
        for stage, (before, after) in enumerate(pairwise(rank_of), start=1):
            if before != after:
                under_way[stage] = entering[stage] / min(self.devices[before].link, self.devices[after].link)
        return tuple(
            replace(
                self.sized.cost(*run, self.speeds[rank]),
                send=under_way[stage + 1],
                send_gradient=under_way[stage],
            )
            for stage, (run, rank) in enumerate(zip(runs, rank_of, strict=True))
        )

    def least(self, costs: Sequence[StageCost]) -> float:
        """A time that a mini-batch does not go below: on each rank its work, behind the way to it, and the way back.

        Where backwards are split, a rank may have work left when the last gradient is on its way back.
        """
        ahead, back, found = 0.0, 0.0, 0.0
        begins = {rank: stages[0] for rank, stages in enumerate(self.simulator.stages_of)}
        m = self.shape.micro_batches
        for stage, cost in enumerate(costs):
            rank = self.program.rank_of[stage]
            if begins[rank] == stage:
                work = m * sum(costs[own].forward + costs[own].backward for own in self.simulator.stages_of[rank])
                found = max(found, ahead + work + (0.0 if self.splits else back))
            ahead += cost.forward + cost.send
            back += cost.backward + (costs[stage + 1].send_gradient or 0.0 if stage + 1 < len(costs) else 0.0)
        return max(found, ahead)

    def settle(self, layers: tuple[int, ...], costs: tuple[StageCost, ...]) -> Settled:
        """Finds what each stage of cuts that fit has to recompute for memory, and times the mini-batch."""
        return Settled(layers, costs, *self.fitting.fastest(costs))


MOST_CUTS_TRIED = 256
"""Up to so many cuts all are tried; beyond, the most even, and neighbours of the best."""
MOST_TIMED_ACTIONS = 300_000
"""Actions that are timed, at most, on the way from neighbour to neighbour."""

Cuts: TypeAlias = tuple[int, ...]
Numbers: TypeAlias = tuple[float, ...]
Even: TypeAlias = Callable[[Numbers, Numbers], Cuts]
"""From what each layer costs and each stage's speed, the cuts whose slowest stage is fastest."""


class Cutter:
    """The best cuts of a shape that were tried so far: the fastest that fit, or else those nearest to fitting.

    Args:
        trial: The shape.
        is_enough: Whether to look no further at cuts that take so many seconds at least.
        even: What `even` gives; shapes ask for the same again and again.
    """

    def __init__(self, trial: Trial, is_enough: Callable[[float], bool], even: Even) -> None:
        self.trial, self._is_enough, self._even = trial, is_enough, even
        self.best: Settled | Misfit | None = None
        self._tried: set[Cuts] = set()
        self.few = are_few(len(trial.sized.layers), trial.shape.stages)

    def begin(self) -> None:
        """Tries all cuts where they are few, else the most even, and the most even that fit if all is recomputed."""
        if self.few:
            for layers in every_cut(len(self.trial.sized.layers), self.trial.shape.stages):
                self._attempt(layers)
            return
        self._attempt(self._even(tuple(self.trial.sized.work), self.trial.stage_speeds))
        fits = isinstance(self.best, Settled) and not any(self.trial.fitting.again(self.best.levels).values())
        if self.best is not None and not fits and (fitting := _fitting(self.trial, self._even)):
            self._attempt(fitting)

    def climb(self) -> None:
        """Goes on to neighbours of the best cuts, one layer moved at a time, while that pays."""
        left = 0 if self.few else MOST_TIMED_ACTIONS // len(self.trial.program.actions)
        better = True
        while better and isinstance(self.best, Settled):
            tried = list(islice(_neighbours(self.best.layers), left))
            better = False
            while tried and not better:
                better = self._attempt(tried.pop(0))
                left -= 1

    def _attempt(self, layers: Cuts) -> bool:
        """Whether these cuts are better than all that were tried."""
        if layers in self._tried:
            return False
        self._tried.add(layers)
        costs = self.trial.costs(layers)
        if self._is_slower(self.trial.least(costs)):
            return False
        found: Settled | Misfit | None = self.trial.fitting.misfit(costs)  # before the table is timed, which is slow
        if found is None:
            if self._is_slower(self.trial.simulator.seconds(costs)):
                return False
            found = self.trial.settle(layers, costs)
        better = self.best is None or _is_better(found, self.best)
        if better:
            self.best = found
        return better

    def _is_slower(self, seconds: float) -> bool:
        """Whether cuts that take so long are no use, though nothing were recomputed."""
        return self._is_enough(seconds) or (isinstance(self.best, Settled) and seconds >= self.best.seconds)


def _is_better(found: Settled | Misfit, best: Settled | Misfit) -> bool:
    match found, best:
        case Settled(), Settled():
            return found.seconds < best.seconds
        case Misfit(), Misfit():
            return found.excess < best.excess
        case _:
            return isinstance(found, Settled)


def are_few(layers: int, stages: int) -> bool:
    """Whether all cuts are to be tried.

    >>> are_few(10, 4), are_few(100, 4)
    (True, False)
    """
    return comb(layers - 1, stages - 1) <= MOST_CUTS_TRIED


def every_cut(layers: int, stages: int) -> Iterator[Cuts]:
    """All ways to give each stage some consecutive layers.

    >>> list(every_cut(4, 2))
    [(1, 3), (2, 2), (3, 1)]
    """
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(end - first for first, end in pairwise((0, *inner, layers)))


def _neighbours(layers: Cuts) -> Iterator[Cuts]:
    """One layer more for a stage, one less for another, near ones first: all cuts between them move by a layer."""
    stages = range(len(layers))
    for source, target in sorted(permutations(stages, 2), key=lambda pair: abs(pair[0] - pair[1])):
        if layers[source] > 1:
            moved = list(layers)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)


def even(work: Numbers, speeds: Numbers) -> Cuts:
    """The cuts whose slowest stage is fastest.

    >>> even((1, 1, 1, 3), speeds=(1, 1))
    (3, 1)
    """
    return partition(work, len(speeds), balance="minmax", speeds=speeds).layers


def _fitting(trial: Trial, even: Even) -> Cuts | None:
    """The most even cuts that fit if all is recomputed and each stage of a rank has an equal share of its memory."""
    work, speeds = tuple(map(add, trial.sized.work, trial.sized.forward)), trial.stage_speeds
    memory = _memory(trial)
    if memory is None:
        return None
    most_even = given(even(work, speeds), work, speeds=speeds, memory=memory)
    if all(map(le, most_even.bytes, most_even.chain.limits)):
        return most_even.layers
    try:
        return partition(work, len(speeds), balance="minmax", speeds=speeds, memory=memory).layers
    except ValueError:  # none do
        return None


def _memory(trial: Trial) -> Memory | None:
    """What the stages hold with all recomputed; one that begins with a layer holds what comes into it twice here.

    None where the limits of all stages together are too low.
    """
    each, sized = trial.shape.stages_per_rank, trial.sized
    state = [layer.state for layer in sized.layers]
    working = max(layer.working.at(sized.rows) for layer in sized.layers)
    limits = [trial.devices[rank].memory / each - working for rank in trial.program.rank_of]
    if min(limits) <= 0 or sum(state) + sum(sized.kept) > sum(limits):
        return None
    return Memory(
        state=state,
        boundary=[sized.entering(at, at + 1) for at in range(len(state))],
        inside=sized.kept,
        limits=limits,
        in_flight=[trial.simulator.in_flight(stage) for stage in range(trial.shape.stages)],
    )
