"""Tries partitions of the layers for one shape, and finds the fastest partition that fits in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, islice, pairwise, permutations
from math import comb
from operator import add, attrgetter, le
from typing import TypeAlias

from gpipe.planner.search.balance import partition
from gpipe.planner.search.candidates import Shape
from gpipe.planner.search.device import Device
from gpipe.planner.search.fitting import Fitting, KeptCounts, LargeTableFitting, Misfit, largest_misfit
from gpipe.planner.search.listing import ROUNDING_FACTOR
from gpipe.planner.search.profile import SizedProfile, bounds
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.cost import StageCost, seconds
from gpipe.schedule.large_tables import LargeTable
from gpipe.schedule.lower import Remat
from gpipe.schedule.partition import Memory, Partition
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import Simulator

StageSizes: TypeAlias = tuple[int, ...]
"""The number of layers in each stage."""
Numbers: TypeAlias = tuple[float, ...]

MAX_SPLITS_TRIED = 256  # with more possible partitions, only balanced ones and neighbors of the best are tried
MAX_TIMED_ACTIONS = 300_000  # the limit of simulated actions while `Trial.improve` moves to neighbors


@dataclass(frozen=True)
class Solution:
    """A partition that fits in memory, with its costs and its recomputation."""

    layers: StageSizes
    costs: tuple[StageCost, ...]
    kept: KeptCounts
    seconds: float


@lru_cache  # Many shapes need the same partitions.
def most_even(work: Numbers, speeds: Numbers) -> StageSizes:
    """Returns the partition whose slowest stage is fastest."""
    return partition(work, len(speeds), balance="minmax", speeds=speeds).layers


def every_split(layers: int, stages: int) -> Iterator[StageSizes]:
    """Yields all partitions of consecutive layers into stages."""
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(end - first for first, end in pairwise((0, *inner, layers)))


def fastest_sizes(starts: Sequence[StageSizes], seconds: Callable[[StageSizes], float], attempts: int) -> StageSizes:
    """Returns the fastest partition that it tries.

    If partitions are equally fast, the first tried partition is returned.

    If the number of partitions is at most `attempts` and `MAX_SPLITS_TRIED`, all partitions are tried. Otherwise the
    search starts from the best of `starts`, and moves one layer at a time while the step becomes faster.

    Args:
        starts: Partitions to start from.
        seconds: A function that returns the step time of a partition.
        attempts: The maximum number of partitions to try.

    >>> fastest_sizes([(3, 1)], lambda sizes: abs(sizes[0] - sizes[1]), attempts=9)
    (2, 2)
    """
    layers, stages = sum(starts[0]), len(starts[0])
    best, least = starts[0], seconds(starts[0])
    tried = {best}

    def attempt(sizes: StageSizes) -> bool:
        nonlocal best, least
        tried.add(sizes)
        took = seconds(sizes)
        is_faster = took < least / ROUNDING_FACTOR
        if is_faster:
            best, least = sizes, took
        return is_faster

    if comb(layers - 1, stages - 1) <= min(attempts, MAX_SPLITS_TRIED):
        for sizes in every_split(layers, stages):
            attempt(sizes)
        return best
    for sizes in starts[1:]:
        attempt(sizes)
    better = True
    while better and len(tried) < attempts:
        untried = (sizes for sizes in _neighbors(best) if sizes not in tried)
        better = any(attempt(sizes) for sizes in islice(untried, attempts - len(tried)))
    return best


class Trial:
    """Tries partitions for one shape and its schedule, and keeps the best partition.

    Args:
        shape: The shape.
        program: The actions of the shape's schedule.
        sized: The costs of the layers, for the micro-batch size of the shape.
        devices: The device of each rank.
        speeds: The speed of each device.
        is_enough: A function that returns whether a partition can be skipped if it needs at least this many seconds.
            Default: never.

    Attributes:
        best: The fastest partition that fits in memory. None if no partition fits.
        misfit: The rank that lacks most memory, in the partition that is closest to fitting. None if all tried
            partitions fit.
        few: Whether all partitions are tried.
    """

    def __init__(
        self,
        shape: Shape,
        program: Program | LargeTable,
        sized: SizedProfile,
        devices: Sequence[Device],
        speeds: Sequence[float],
        is_enough: Callable[[float], bool] = lambda seconds: False,
    ) -> None:
        self.shape, self.program, self.sized, self.devices, self.speeds = shape, program, sized, devices, speeds
        self.stage_speeds = tuple(speeds[rank] for rank in program.rank_of)
        self.best: Solution | None = None
        self.misfit: Misfit | None = None
        splits = comb(len(sized.layers) - 1, shape.stages - 1)
        self.few = isinstance(program, Program) and splits <= MAX_SPLITS_TRIED
        self._is_enough = is_enough
        self._tried: set[StageSizes] = set()

    @cached_property
    def fitting(self) -> Fitting | LargeTableFitting:
        limits = [device.memory for device in self.devices]
        if isinstance(self.program, LargeTable):
            return LargeTableFitting(self.program, limits)
        return Fitting(Simulator(self.program, messages=True), limits)

    def try_initial(self) -> None:
        """Tries the first partitions.

        - If there are few partitions, all of them.
        - Otherwise the most even partition, and the most even partition that fits with recomputation everywhere.
        - For a large table, only the most even partition.
        """
        if self.few:
            for sizes in every_split(len(self.sized.layers), self.shape.stages):
                self.attempt(sizes)
            return
        self.attempt(most_even(tuple(self.sized.work), self.stage_speeds))
        if isinstance(self.fitting, LargeTableFitting):
            return
        recomputes = self.best is not None and any(self.fitting.recomputed(self.best.kept).values())
        if (recomputes or self.misfit is not None) and (fitting := self._most_even_that_fits(self.fitting.simulator)):
            self.attempt(fitting)

    def improve(self) -> None:
        """Moves one layer of the best partition at a time, as long as this makes the step faster."""
        left = 0 if self.few else MAX_TIMED_ACTIONS // self.shape.actions
        better = True
        while better and self.best is not None:
            better = False
            for sizes in islice(_neighbors(self.best.layers), left):
                left -= 1
                if better := self.attempt(sizes):
                    break

    def costs(self, sizes: StageSizes) -> tuple[StageCost, ...]:
        """Returns the cost of each stage, including its messages."""
        return message_costs(self.sized, self.devices, self.speeds, sizes, self.program.rank_of)

    def least_seconds(self, costs: Sequence[StageCost]) -> float:
        """Returns a lower bound on the step time of every schedule for these stages.

        For each rank, the bound is the time until its first input arrives, plus its work. With whole backward passes,
        the bound also includes the path of the last gradient from that rank back to stage 0.
        """
        shape, path, begins, work = self.shape, 0.0, dict[int, float](), [0.0] * self.shape.partitions
        for stage, (cost, rank) in enumerate(zip(costs, self.program.rank_of, strict=True)):
            parts = sum(seconds(Action(kind, stage), costs) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
            path += 0.0 if shape.splits else cost.send_gradient or 0.0
            begins.setdefault(rank, path)
            path += cost.forward + cost.send + (0.0 if shape.splits else cost.backward)
            work[rank] += cost.forward + (min(cost.backward, parts) if shape.splits else cost.backward)
        return max(begin + shape.micro_batches * work[rank] for rank, begin in begins.items()) / ROUNDING_FACTOR

    def attempt(self, sizes: StageSizes) -> bool:
        """Tries a partition. Returns whether it fits and is faster than all partitions before it."""
        if sizes in self._tried:
            return False
        self._tried.add(sizes)
        costs = self.costs(sizes)
        if self._is_too_slow(self.least_seconds(costs)):
            return False
        misfit = self._surely_too_big(costs) or self.fitting.misfit(costs)
        if misfit is not None:
            self.misfit = min(misfit, self.misfit or misfit, key=attrgetter("distance"))
            return False
        if self._is_too_slow(self.fitting.simulator.seconds(costs)):  # even without recomputation
            return False
        solution = Solution(sizes, costs, *self.fitting.fastest(costs))
        better = self.best is None or solution.seconds < self.best.seconds
        self.best = solution if better else self.best
        return better

    def _surely_too_big(self, costs: Sequence[StageCost]) -> Misfit | None:
        """Returns the rank that exceeds its memory most by a lower bound: its state, and one backward of a stage."""
        state, backward = [0] * self.shape.partitions, [0] * self.shape.partitions
        for rank, cost in zip(self.program.rank_of, costs, strict=True):
            state[rank] += cost.state
            backward[rank] = max(backward[rank], cost.activations + (0 if self.shape.splits else cost.working))
        return largest_misfit(map(add, state, backward), [device.memory for device in self.devices], is_bound=True)

    def _is_too_slow(self, seconds: float) -> bool:
        return self._is_enough(seconds) or (self.best is not None and seconds >= self.best.seconds)

    def _most_even_that_fits(self, simulator: Simulator) -> StageSizes | None:
        """Returns the most even partition that fits if everything is recomputed; None if no partition fits.

        The memory of a rank is divided equally among its stages. The estimate counts the input of each stage twice:
        as boundary, and as a tensor that the first layer keeps.
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
            boundary=[sized.entering(layer, layer + 1) for layer in range(len(state))],
            activations=sized.kept,
            limits=limits,
            in_flight=[simulator.in_flight(stage) for stage in range(shape.stages)],
        )
        sizes, speeds = most_even(work, self.stage_speeds), self.stage_speeds
        even = Partition.of_sizes(sizes, work, speeds=speeds, memory=memory)
        if all(map(le, even.bytes, even.layer_costs.limits)):
            return sizes
        try:
            return partition(work, shape.stages, balance="minmax", speeds=speeds, memory=memory).layers
        except ValueError:  # No partition fits.
            return None


def message_costs(
    sized: SizedProfile,
    devices: Sequence[Device],
    speeds: Sequence[float],
    sizes: StageSizes,
    rank_of: Sequence[int],
    host_remat: Remat | None = None,
) -> tuple[StageCost, ...]:
    """Returns the costs of stages, including offloading and messages. A message uses the slower of two links.

    If the weights are on the host, `host_remat` is the recomputation mode of the stages. Default: None, they are not.
    """
    runs = bounds(sizes)
    message_seconds = [0.0] * (len(runs) + 1)
    for stage, (before, after) in enumerate(pairwise(rank_of), start=1):
        if before != after:
            link = min(devices[before].link, devices[after].link)
            message_seconds[stage] = sized.entering(*runs[stage]) / link
    on_host = host_remat is not None
    bare = (sized.cost(*run, speeds[rank], on_host=on_host) for run, rank in zip(runs, rank_of, strict=True))
    messages = zip(bare, message_seconds[1:], message_seconds[:-1], strict=True)
    hosts = (devices[rank].host for rank in rank_of)
    return tuple(
        replace(cost.with_host(host, host_remat) if host else cost, send=ahead, send_gradient=back)
        for (cost, ahead, back), host in zip(messages, hosts, strict=True)
    )


def _neighbors(sizes: StageSizes) -> Iterator[StageSizes]:
    """Yields partitions in which one layer more is in one stage and one layer less in a different stage."""
    stages = range(len(sizes))
    for source, target in sorted(permutations(stages, 2), key=lambda pair: abs(pair[0] - pair[1])):
        if sizes[source] > 1:
            change = {source: -1, target: 1}
            yield tuple(size + change.get(stage, 0) for stage, size in enumerate(sizes))
