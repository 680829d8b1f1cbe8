"""Finds the cuts of a shape with which a mini-batch is fastest, one after another: what stages cost, and how long."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, islice, pairwise, permutations
from math import comb
from operator import add, le
from typing import TypeAlias

from gpipe.planner.search.cuts import partition
from gpipe.planner.search.device import Device
from gpipe.planner.search.fitting import Fitting, FittingMany, Levels, Misfit
from gpipe.planner.search.listing import ROUNDING_FACTOR
from gpipe.planner.search.profile import SizedProfile, bounds
from gpipe.planner.search.shapes import Shape
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.cost import StageCost, seconds
from gpipe.schedule.many import Many
from gpipe.schedule.partition import Memory, given
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import Simulator

Cuts: TypeAlias = tuple[int, ...]
Numbers: TypeAlias = tuple[float, ...]

MOST_CUTS_TRIED = 256  # up to so many cuts all are tried; beyond, the most even, and neighbours of the best
MOST_TIMED_ACTIONS = 300_000  # actions that are timed, at most, on the way from neighbour to neighbour


@dataclass(frozen=True)
class Settled:
    """Cuts that fit, with what is recomputed."""

    layers: Cuts
    costs: tuple[StageCost, ...]
    levels: Levels
    seconds: float


@lru_cache
def even(work: Numbers, speeds: Numbers) -> Cuts:
    """The cuts whose slowest stage is fastest; shapes ask for the same again and again."""
    return partition(work, len(speeds), balance="minmax", speeds=speeds).layers


def every_cut(layers: int, stages: int) -> Iterator[Cuts]:
    """All ways to give each stage some consecutive layers."""
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(end - first for first, end in pairwise((0, *inner, layers)))


def fastest_cuts(starts: Sequence[Cuts], seconds: Callable[[Cuts], float], attempts: int) -> Cuts:
    """Finds the cuts with which a step is fastest, in so many attempts at most; of ties, the first start.

    Where all cuts are no more than that, and few, it tries all; else it goes on from the best of `starts` to
    neighbours, one layer moved at a time, while that pays.

    >>> fastest_cuts([(3, 1)], lambda cuts: abs(cuts[0] - cuts[1]), attempts=9)
    (2, 2)
    """
    layers, stages = sum(starts[0]), len(starts[0])
    found, least = starts[0], seconds(starts[0])
    tried = {found}

    def attempt(cuts: Cuts) -> bool:
        nonlocal found, least
        tried.add(cuts)
        took = seconds(cuts)
        is_faster = took < least / ROUNDING_FACTOR
        if is_faster:
            found, least = cuts, took
        return is_faster

    if comb(layers - 1, stages - 1) <= min(attempts, MOST_CUTS_TRIED):
        for cuts in every_cut(layers, stages):
            attempt(cuts)
        return found
    for cuts in starts[1:]:
        attempt(cuts)
    better = True
    while better and len(tried) < attempts:
        others = (cuts for cuts in _neighbours(found) if cuts not in tried)
        better = any(attempt(cuts) for cuts in islice(others, attempts - len(tried)))
    return found


class Trial:
    """A shape and its table on its devices, and the best of its cuts that were tried so far.

    By `is_enough` cuts that take so many seconds at least are looked at no further.
    """

    def __init__(
        self,
        shape: Shape,
        program: Program | Many,
        sized: SizedProfile,
        devices: Sequence[Device],
        speeds: Sequence[float],
        is_enough: Callable[[float], bool] = lambda seconds: False,
    ) -> None:
        self.shape, self.program, self.sized, self.devices, self.speeds = shape, program, sized, devices, speeds
        self.stage_speeds = tuple(speeds[rank] for rank in program.rank_of)
        self.best: Settled | None = None  # the fastest cuts that fit
        self.misfit: Misfit | None = None  # of those that do not, the nearest to it
        self.few = isinstance(program, Program) and comb(len(sized.layers) - 1, shape.stages - 1) <= MOST_CUTS_TRIED
        self._is_enough = is_enough
        self._tried: set[Cuts] = set()

    @cached_property
    def fitting(self) -> Fitting | FittingMany:
        limits = [device.memory for device in self.devices]
        if isinstance(self.program, Many):
            return FittingMany(self.program, limits)
        return Fitting(Simulator(self.program, messages=True), limits)

    def begin(self) -> None:
        """Tries all cuts where they are few, else the most even, and the most even that fit if all is recomputed.

        Of a large table only the most even.
        """
        if self.few:
            for layers in every_cut(len(self.sized.layers), self.shape.stages):
                self.attempt(layers)
            return
        self.attempt(even(tuple(self.sized.work), self.stage_speeds))
        if isinstance(self.fitting, FittingMany):
            return
        recomputes = self.best is not None and any(self.fitting.again(self.best.levels).values())
        if (recomputes or self.misfit is not None) and (fitting := self._even_that_fit(self.fitting.simulator)):
            self.attempt(fitting)

    def climb(self) -> None:
        """Goes on to neighbours of the best cuts, one layer moved at a time, while that pays."""
        left = 0 if self.few else MOST_TIMED_ACTIONS // self.shape.actions
        better = True
        while better and self.best is not None:
            better = False
            for layers in islice(_neighbours(self.best.layers), left):
                left -= 1
                if better := self.attempt(layers):
                    break

    def costs(self, layers: Cuts) -> tuple[StageCost, ...]:
        """What each stage costs, its messages included."""
        return message_costs(self.sized, self.devices, self.speeds, layers, self.program.rank_of)

    def least_seconds(self, costs: Sequence[StageCost]) -> float:
        """A time that no table of these stages goes below: each rank's work, behind what first comes to it.

        Where backwards are whole also ahead of the way back from there.
        """
        shape, way, begins, work = self.shape, 0.0, dict[int, float](), [0.0] * self.shape.partitions
        for stage, (cost, rank) in enumerate(zip(costs, self.program.rank_of, strict=True)):
            parts = sum(seconds(Action(kind, stage), costs) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
            way += 0.0 if shape.splits else cost.send_gradient or 0.0
            begins.setdefault(rank, way)
            way += cost.forward + cost.send + (0.0 if shape.splits else cost.backward)
            work[rank] += cost.forward + (min(cost.backward, parts) if shape.splits else cost.backward)
        return max(begin + shape.micro_batches * work[rank] for rank, begin in begins.items()) / ROUNDING_FACTOR

    def attempt(self, layers: Cuts) -> bool:
        """Whether these cuts are the fastest of all that were tried and fit."""
        if layers in self._tried:
            return False
        self._tried.add(layers)
        costs = self.costs(layers)
        if self._is_too_slow(self.least_seconds(costs)):
            return False
        misfit = self.fitting.misfit(costs)
        if misfit is not None:
            self.misfit = min(misfit, self.misfit or misfit, key=lambda each: each.excess)
            return False
        if self._is_too_slow(self.fitting.simulator.seconds(costs)):  # if nothing were recomputed
            return False
        found = Settled(layers, costs, *self.fitting.fastest(costs))
        better = self.best is None or found.seconds < self.best.seconds
        self.best = found if better else self.best
        return better

    def _is_too_slow(self, seconds: float) -> bool:
        return self._is_enough(seconds) or (self.best is not None and seconds >= self.best.seconds)

    def _even_that_fit(self, simulator: Simulator) -> Cuts | None:
        """The most even cuts that fit if all is recomputed and each stage of a rank has an equal share of its memory.

        A stage that begins with a layer holds what comes into it twice here.
        """
        sized, shape = self.sized, self.shape
        work = tuple(map(add, sized.work, sized.forward))
        state = [layer.state for layer in sized.layers]
        working = max(layer.working.at(sized.rows) for layer in sized.layers)
        limits = [self.devices[rank].memory / shape.stages_per_rank - working for rank in self.program.rank_of]
        if min(limits) <= 0 or sum(state) + sum(sized.kept) > sum(limits):
            return None
        memory = Memory(
            state=state,
            boundary=[sized.entering(at, at + 1) for at in range(len(state))],
            inside=sized.kept,
            limits=limits,
            in_flight=[simulator.in_flight(stage) for stage in range(shape.stages)],
        )
        most_even = given(even(work, self.stage_speeds), work, speeds=self.stage_speeds, memory=memory)
        if all(map(le, most_even.bytes, most_even.chain.limits)):
            return most_even.layers
        try:
            return partition(work, shape.stages, balance="minmax", speeds=self.stage_speeds, memory=memory).layers
        except ValueError:  # none do
            return None


def message_costs(
    sized: SizedProfile, devices: Sequence[Device], speeds: Sequence[float], layers: Cuts, rank_of: Sequence[int]
) -> tuple[StageCost, ...]:
    """What stages on these ranks cost with messages, which the slower of two links carries, and moves to the host."""
    runs = bounds(layers)
    under_way = [0.0] * (len(runs) + 1)
    for stage, (before, after) in enumerate(pairwise(rank_of), start=1):
        if before != after:
            link = min(devices[before].link, devices[after].link)
            under_way[stage] = sized.entering(*runs[stage]) / link
    bare = (sized.cost(*run, speeds[rank]) for run, rank in zip(runs, rank_of, strict=True))
    messages = zip(bare, under_way[1:], under_way[:-1], strict=True)
    hosts = (devices[rank].host for rank in rank_of)
    return tuple(
        replace(cost, send=ahead, send_gradient=back, move=cost.inside / host if host else 0.0)
        for (cost, ahead, back), host in zip(messages, hosts, strict=True)
    )


def _neighbours(layers: Cuts) -> Iterator[Cuts]:
    """One layer more for a stage, one less for another, near ones first: all cuts between them move by a layer."""
    stages = range(len(layers))
    for source, target in sorted(permutations(stages, 2), key=lambda pair: abs(pair[0] - pair[1])):
        if layers[source] > 1:
            change = {source: -1, target: 1}
            yield tuple(count + change.get(stage, 0) for stage, count in enumerate(layers))
