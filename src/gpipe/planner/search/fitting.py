"""Finds what has to be recomputed for stages to fit on their ranks, and no more."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from math import inf, prod
from operator import attrgetter, ge, le
from typing import TypeAlias

from gpipe.planner.search.device import bytes_text
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat, place_remat, place_transfers, recomputed
from gpipe.schedule.many import Many
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import MicroBatches, Recomputed, Simulation, Simulator, simulate

Levels: TypeAlias = tuple[int, ...]
"""Of each stage of a rank, or of each stage, how many micro-batches at once keep what is inside."""
Own: TypeAlias = tuple[StageCost, ...]  # what the stages of one rank cost
MOST_LEVELS, MOST_OPTIONS = 16, 64
"""Up to so many ways to share the memory of a rank among its stages, and to choose among these ways on all ranks, all
are tried; beyond, each rank recomputes for the least time."""


@dataclass(frozen=True)
class Misfit:
    """Stages that do not fit, though everything is recomputed: the rank that is furthest over what it may hold."""

    rank: int
    bytes: float
    limit: float

    @property
    def excess(self) -> float:
        """How many times what it may hold is needed."""
        return self.bytes / self.limit

    def __str__(self) -> str:
        return f"rank {self.rank} needs {bytes_text(self.bytes)} of {bytes_text(self.limit)}, all recomputed"


class Fitting:
    """Stages of any costs, on ranks each of which may hold so many bytes."""

    def __init__(self, simulator: Simulator, limits: Sequence[float]) -> None:
        self.simulator, self.limits = simulator, limits
        self._recomputed = cache(self._find_recomputed)
        # asked again and again for ranks that keep their layers while others are moved
        self._options = cache(lambda rank, own: list(self._find_options(rank, own)))

    def _find_recomputed(self, stage: int, level: int) -> MicroBatches:
        program = self.simulator.program
        again = recomputed(program.table[program.rank_of[stage]], [level] * program.stages)
        return frozenset(m for other, m in again if other == stage)

    def _own(self, costs: Sequence[StageCost]) -> list[Own]:
        return [tuple(costs[stage] for stage in stages) for stages in self.simulator.stages_of]

    def _peak_bytes(self, rank: int, own: Own, levels: Levels) -> int:
        again = map(self._recomputed, self.simulator.stages_of[rank], levels)
        return self.simulator.peak_bytes(rank, own, tuple(again))

    def misfit(self, costs: Sequence[StageCost]) -> Misfit | None:
        """The rank that is furthest over what it may hold, though everything is recomputed; None: all fit."""
        found = []
        for rank, (own, limit) in enumerate(zip(self._own(costs), self.limits, strict=True)):
            if not self._keeps_all(rank, own) and (held := self._peak_bytes(rank, own, (0,) * len(own))) > limit:
                found.append(Misfit(rank, held, limit))
        return max(found, key=attrgetter("excess"), default=None)

    def _keeps_all(self, rank: int, own: Own) -> bool:
        """Whether a rank fits that recomputes nothing."""
        limit = self.limits[rank]
        return limit == inf or self.simulator.peak_bytes(rank, own, (frozenset(),) * len(own)) <= limit

    def fastest(self, costs: Sequence[StageCost]) -> tuple[Levels, float]:
        """The levels of all stages, which are no `misfit`, with which a mini-batch is fastest; and its seconds."""
        owns = self._own(costs)
        options = [self._options(rank, own) for rank, own in enumerate(owns)]
        if prod(map(len, options)) > MOST_OPTIONS:
            each = zip(self.simulator.stages_of, owns, options, strict=True)
            options = [[self._least_recomputed(*of_rank)] for of_rank in each]
        timed = []
        for choice in product(*options):
            by_stage = sorted(zip(chain(*self.simulator.stages_of), chain(*choice), strict=True))
            levels = tuple(level for _, level in by_stage)
            timed.append((levels, self.simulator.seconds(costs, self.again(levels))))
        return min(timed, key=lambda levels_and_seconds: levels_and_seconds[1])

    def busy(self, costs: Sequence[StageCost], levels: Levels) -> float:
        """The seconds that all ranks compute together, with the levels of all stages."""
        return self.simulator.busy(costs, self.again(levels))

    def again(self, levels: Levels) -> Recomputed:
        return {stage: self._recomputed(stage, level) for stage, level in enumerate(levels)}

    def peaks(self, costs: Sequence[StageCost], levels: Levels) -> tuple[int, ...]:
        """The most bytes that each rank holds, with the levels of all stages."""
        each = enumerate(zip(self._own(costs), self.simulator.stages_of, strict=True))
        return tuple(self._peak_bytes(rank, own, tuple(levels[at] for at in stages)) for rank, (own, stages) in each)

    def remat(self, levels: Levels) -> tuple[Remat, ...]:
        """What the stages recompute, in the words of `GPipe`."""
        tops = map(self.simulator.in_flight, range(len(levels)))
        return tuple("never" if level == top else level or "always" for level, top in zip(levels, tops, strict=True))

    def _find_options(self, rank: int, own: Own) -> Iterator[Levels]:
        """The levels of a rank's stages with which it fits, but those where one could be higher."""
        tops = tuple(map(self.simulator.in_flight, self.simulator.stages_of[rank]))

        def fits(levels: Levels) -> bool:
            return self._peak_bytes(rank, own, levels) <= self.limits[rank]

        def raised(levels: Levels, at: int) -> Levels:
            """The levels, with which the rank fits, with one of them as high as that goes."""
            others = levels[:at], levels[at + 1 :]
            level = highest(levels[at], tops[at], lambda level: fits((*others[0], level, *others[1])))
            return (*others[0], level, *others[1])

        if self._keeps_all(rank, own):
            yield tops
        elif prod(top + 1 for top in tops[:-1]) <= MOST_LEVELS:
            found: list[Levels] = []
            for firsts in product(*(range(top, -1, -1) for top in tops[:-1])):
                if fits((*firsts, 0)):
                    levels = raised((*firsts, 0), len(firsts))
                    if not any(all(map(ge, other, levels)) for other in found):
                        found.append(levels)
            yield from found
        else:

            def capped(level: int) -> Levels:
                return tuple(min(level, top) for top in tops)

            levels = capped(highest(0, max(tops), lambda level: fits(capped(level))))
            for at in range(len(tops)):
                levels = raised(levels, at)
            yield levels

    def _least_recomputed(self, stages: Sequence[int], own: Own, options: Sequence[Levels]) -> Levels:

        def recomputes(levels: Levels) -> float:
            each = zip(own, map(self._recomputed, stages, levels), strict=True)
            return sum(cost.again * len(again) for cost, again in each)

        return min(options, key=recomputes)


class FittingMany:
    """As `Fitting`, of a table that is too large to be listed: a stage recomputes all micro-batches, or none."""

    def __init__(self, simulator: Many, limits: Sequence[float]) -> None:
        self.simulator, self.limits = simulator, limits

    def misfit(self, costs: Sequence[StageCost]) -> Misfit | None:
        """The first rank that holds more than it may, though everything is recomputed; None: all fit."""
        for rank, limit in enumerate(self.limits):
            held = self.simulator.peak_bytes(rank, costs, range(len(costs)))
            if held > limit:
                return Misfit(rank, held, limit)
        return None

    def fastest(self, costs: Sequence[StageCost]) -> tuple[Levels, float]:
        """For each stage 1, or 0 where all stages of its rank recompute; and the seconds of a mini-batch."""
        fits = [self.simulator.peak_bytes(rank, costs) <= limit for rank, limit in enumerate(self.limits)]
        levels = tuple(int(fits[rank]) for rank in self.simulator.rank_of)
        return levels, self.simulator.seconds(costs, self._again(levels))

    def busy(self, costs: Sequence[StageCost], levels: Levels) -> float:
        return self.simulator.busy(costs, self._again(levels))

    def peaks(self, costs: Sequence[StageCost], levels: Levels) -> tuple[int, ...]:
        again = self._again(levels)
        return tuple(self.simulator.peak_bytes(rank, costs, again) for rank in range(len(self.limits)))

    def remat(self, levels: Levels) -> tuple[Remat, ...]:
        return tuple("never" if level else "always" for level in levels)

    def _again(self, levels: Levels) -> frozenset[int]:
        return frozenset(stage for stage, level in enumerate(levels) if not level)


def highest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The highest number up to which all fit, where the lowest does."""
    return low + bisect_right(range(low + 1, high + 1), False, key=lambda number: not fits(number))


def fitting_remat(program: Program, costs: Sequence[StageCost], limits: Sequence[float]) -> tuple[Remat, ...]:
    """What the stages of a table recompute so that each rank holds at most so many bytes, and no more than that."""
    fitting = Fitting(Simulator(program), limits)
    if misfit := fitting.misfit(costs):
        raise ValueError(str(misfit))
    levels, _ = fitting.fastest(costs)
    return fitting.remat(levels)


def _run(program: Program, costs: Sequence[StageCost], remat: Sequence[Remat]) -> Simulation:
    return simulate(place_transfers(place_remat(program, remat)), costs)


def fits(program: Program, costs: Sequence[StageCost], limits: Sequence[float], remat: Sequence[Remat]) -> bool:
    """Whether each rank holds at most so many bytes, if the stages of a table recompute so."""
    return all(map(le, _run(program, costs, remat).peak_bytes, limits))


def offloading(
    program: Program, costs: Sequence[StageCost], limits: Sequence[float], remat: tuple[Remat, ...]
) -> tuple[Remat, ...]:
    """The same, but with `"offload"` at each stage that so fits as well and saves its recompute at no time more.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> costs = [StageCost(1.0, 2.0, move=5.0, inside=8), StageCost(1.0, 2.0, move=0.5, inside=8)]
    >>> offloading(program_of("gpipe", 2, 8), costs, [16, 16], ("always", "always"))
    ('always', 'offload')
    """

    def took(remat: tuple[Remat, ...]) -> tuple[bool, float]:
        found = _run(program, costs, remat)
        return all(map(le, found.peak_bytes, limits)), found.timeline.seconds

    possible = [stage for stage, cost in enumerate(costs) if cost.move and remat[stage] != "never"]
    seconds = took(remat)[1] if possible else 0.0
    for stage in possible:
        other: tuple[Remat, ...] = (*remat[:stage], "offload", *remat[stage + 1 :])
        fits, others = took(other)
        if fits and others <= seconds:
            remat, seconds = other, others
    return remat
