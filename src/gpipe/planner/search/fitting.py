"""Finds what has to be recomputed for stages to fit on their ranks, and no more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import prod
from operator import ge
from typing import TypeAlias, TypeVar

from gpipe.planner.search.device import bytes_text
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat, recomputed
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import MicroBatches, Recomputed, Simulator

Levels: TypeAlias = tuple[int, ...]
"""Of each stage of a rank, or of each stage, how many micro-batches at once keep what is inside."""
Own: TypeAlias = tuple[StageCost, ...]
"""What the stages of one rank cost."""
Each = TypeVar("Each")
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


@dataclass(frozen=True)
class Fitting:
    """Stages of any costs, on ranks that hold so many bytes.

    Attributes:
        simulator: Of the table of forwards and backwards.
        limits: The bytes that each rank may hold.
    """

    simulator: Simulator
    limits: Sequence[float]

    @cached_property
    def _options(self) -> Callable[[int, Own], list[Levels]]:
        """`_fitting`, which is asked again and again for ranks that keep their layers while others are moved."""
        return cache(lambda rank, own: list(self._fitting(rank, own)))

    @cached_property
    def _recomputed_by_rank(self) -> Callable[[int, int], dict[int, MicroBatches]]:
        return cache(self._find_recomputed)

    def _find_recomputed(self, rank: int, level: int) -> dict[int, MicroBatches]:
        """What each stage of a rank recomputes, if all have this level."""
        program = self.simulator.program
        again = recomputed(program.rows[rank], [level] * program.stages)
        return {stage: frozenset(m for s, m in again if s == stage) for stage in self.simulator.stages_of[rank]}

    def _recomputed(self, stage: int, level: int) -> MicroBatches:
        return self._recomputed_by_rank(self.simulator.program.rank_of[stage], level)[stage]

    def _of_rank(self, rank: int, of_stages: Sequence[Each]) -> tuple[Each, ...]:
        """What is said of a rank's stages, of what is said of all."""
        return tuple(of_stages[stage] for stage in self.simulator.stages_of[rank])

    def _peak_bytes(self, rank: int, own: Own, levels: Levels) -> int:
        """The most bytes that a rank holds, if its stages cost so much and have these levels."""
        stages = zip(self.simulator.stages_of[rank], levels, strict=True)
        return self.simulator.peak_bytes(rank, own, tuple(self._recomputed(*each) for each in stages))

    def misfit(self, costs: Sequence[StageCost]) -> Misfit | None:
        """The rank that is furthest over what it may hold, though everything is recomputed; None: all fit."""
        found = []
        for rank, limit in enumerate(self.limits):
            own = self._of_rank(rank, costs)
            if (held := self._peak_bytes(rank, own, (0,) * len(own))) > limit:
                found.append(Misfit(rank, held, limit))
        return max(found, key=lambda misfit: misfit.excess, default=None)

    def fastest(self, costs: Sequence[StageCost]) -> tuple[Levels, float]:
        """The levels of all stages, which are no `misfit`, with which a mini-batch is fastest; and its seconds."""
        ranks = range(len(self.limits))
        owns = [self._of_rank(rank, costs) for rank in ranks]
        options = list(map(self._options, ranks, owns))
        if prod(map(len, options)) > MOST_OPTIONS:
            options = [[self._least_recomputed(rank, owns[rank], options[rank])] for rank in ranks]
        timed = (self._timed(costs, choice) for choice in product(*options))
        return min(timed, key=lambda levels_and_seconds: levels_and_seconds[1])

    def again(self, levels: Levels) -> Recomputed:
        """What all stages recompute, with these levels."""
        return {stage: self._recomputed(stage, level) for stage, level in enumerate(levels)}

    def peaks(self, costs: Sequence[StageCost], levels: Levels) -> tuple[int, ...]:
        """The most bytes that each rank holds, with the levels of all stages."""
        return tuple(
            self._peak_bytes(rank, self._of_rank(rank, costs), self._of_rank(rank, levels))
            for rank in range(len(self.limits))
        )

    def remat(self, levels: Levels) -> tuple[Remat, ...]:
        """What the stages recompute, in the words of `GPipe`."""
        tops = map(self.simulator.in_flight, range(len(levels)))
        return tuple("never" if level == top else level or "always" for level, top in zip(levels, tops, strict=True))

    def _timed(self, costs: Sequence[StageCost], choice: Sequence[Levels]) -> tuple[Levels, float]:
        """The levels of all stages, of those that each rank has chosen for its own; and the seconds."""
        levels = dict[int, int]()
        for stages, own in zip(self.simulator.stages_of, choice, strict=True):
            levels |= zip(stages, own, strict=True)
        in_order = tuple(levels[stage] for stage in range(len(levels)))
        return in_order, self.simulator.seconds(costs, self.again(in_order))

    def _fitting(self, rank: int, own: Own) -> Iterator[Levels]:
        """The levels of a rank's stages with which it fits, but those where one could be higher.

        Many stages with many levels are raised together as far as they go, then one after the other.
        """
        tops = tuple(self.simulator.in_flight(stage) for stage in self.simulator.stages_of[rank])
        if self._fits(rank, own, tops):
            yield tops
        elif prod(top + 1 for top in tops[:-1]) <= MOST_LEVELS:
            found: list[Levels] = []
            for firsts in product(*(range(top, -1, -1) for top in tops[:-1])):
                if self._fits(rank, own, (*firsts, 0)):
                    levels = self._raised(rank, own, (*firsts, 0), len(firsts), tops[-1])
                    if not any(all(map(ge, other, levels)) for other in found):
                        found.append(levels)
            yield from found
        else:
            level = highest(0, max(tops), lambda level: self._fits(rank, own, _capped(level, tops)))
            levels = _capped(level, tops)
            for at, top in enumerate(tops):
                levels = self._raised(rank, own, levels, at, top)
            yield levels

    def _raised(self, rank: int, own: Own, levels: Levels, at: int, top: int) -> Levels:
        """The levels, with which the rank fits, with one of them as high as that goes."""

        def raised(level: int) -> Levels:
            return (*levels[:at], level, *levels[at + 1 :])

        return raised(highest(levels[at], top, lambda level: self._fits(rank, own, raised(level))))

    def _fits(self, rank: int, own: Own, levels: Levels) -> bool:
        return self._peak_bytes(rank, own, levels) <= self.limits[rank]

    def _least_recomputed(self, rank: int, own: Own, options: Sequence[Levels]) -> Levels:
        """The levels with which a rank recomputes for the least time."""
        stages = self.simulator.stages_of[rank]

        def recomputes(levels: Levels) -> float:
            each = zip(stages, own, levels, strict=True)
            return sum(cost.forward * len(self._recomputed(stage, level)) for stage, cost, level in each)

        return min(options, key=recomputes)


def _capped(level: int, tops: Levels) -> Levels:
    return tuple(min(level, top) for top in tops)


def highest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The highest number up to which all fit, where the lowest does.

    >>> highest(0, 9, lambda number: number < 6)
    5
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def fitting_remat(program: Program, costs: Sequence[StageCost], limits: Sequence[float]) -> tuple[Remat, ...]:
    """What the stages of a table recompute so that each rank holds at most so many bytes, and no more than that.

    Raises:
        ValueError: They do not fit though everything is recomputed.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> costs = [StageCost(1.0, 2.0, boundary=1, inside=10)] * 2
    >>> fitting_remat(program_of("1f1b", ranks=2, micro_batches=4), costs, limits=[21, 30])
    ('always', 'never')
    """
    fitting = Fitting(Simulator(program), limits)
    if misfit := fitting.misfit(costs):
        raise ValueError(str(misfit))
    levels, _ = fitting.fastest(costs)
    return fitting.remat(levels)
