"""Finds what has to be recomputed for stages to fit on their ranks, and no more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import prod
from operator import ge
from typing import TypeAlias

from gpipe.planner.search.device import bytes_text
from gpipe.planner.search.rehearsal import Cell, Own, Rehearsal
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat
from gpipe.schedule.program import Program

Levels: TypeAlias = tuple[int, ...]
"""Of each stage of a rank, or of each stage, how many micro-batches at once keep what is inside."""
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
        rehearsal: Of the table.
        limits: The bytes that each rank may hold.
    """

    rehearsal: Rehearsal
    limits: Sequence[float]

    @cached_property
    def _options(self) -> Callable[[int, Own], list[Levels]]:
        """`_fitting`, which is asked again and again for ranks that keep their layers while others are moved."""
        return cache(lambda rank, own: list(self._fitting(rank, own)))

    def misfit(self, costs: Sequence[StageCost]) -> Misfit | None:
        """The rank that is furthest over what it may hold, though everything is recomputed; None: all fit."""
        found = []
        for rank, limit in enumerate(self.limits):
            own = self.rehearsal.of_rank(rank, costs)
            if (held := self.rehearsal.peak(rank, own, (0,) * len(own))) > limit:
                found.append(Misfit(rank, held, limit))
        return max(found, key=lambda misfit: misfit.excess, default=None)

    def fastest(self, costs: Sequence[StageCost]) -> tuple[Levels, float]:
        """The levels of all stages, which are no `misfit`, with which a mini-batch is fastest; and its seconds."""
        ranks = range(len(self.limits))
        owns = [self.rehearsal.of_rank(rank, costs) for rank in ranks]
        options = list(map(self._options, ranks, owns))
        if prod(map(len, options)) > MOST_OPTIONS:
            options = [[self._least_recomputed(rank, owns[rank], options[rank])] for rank in ranks]
        timed = (self._timed(costs, choice) for choice in product(*options))
        return min(timed, key=lambda levels_and_seconds: levels_and_seconds[1])

    def again(self, levels: Levels) -> set[Cell]:
        """What all ranks recompute, with the levels of all stages."""
        return {cell for stage, level in enumerate(levels) for cell in self.rehearsal.recomputed(stage, level)}

    def peaks(self, costs: Sequence[StageCost], levels: Levels) -> tuple[int, ...]:
        """The most bytes that each rank holds, with the levels of all stages."""
        of_rank = self.rehearsal.of_rank
        return tuple(
            self.rehearsal.peak(rank, of_rank(rank, costs), of_rank(rank, levels)) for rank in range(len(self.limits))
        )

    def remat(self, levels: Levels) -> tuple[Remat, ...]:
        """What the stages recompute, in the words of `GPipe`."""
        tops = map(self.rehearsal.in_flight, range(len(levels)))
        return tuple("never" if level == top else level or "always" for level, top in zip(levels, tops, strict=True))

    def _timed(self, costs: Sequence[StageCost], choice: Sequence[Levels]) -> tuple[Levels, float]:
        """The levels of all stages, of those that each rank has chosen for its own; and the seconds."""
        levels = dict[int, int]()
        for stages, own in zip(self.rehearsal.stages_of, choice, strict=True):
            levels |= zip(stages, own, strict=True)
        in_order = tuple(levels[stage] for stage in range(len(levels)))
        return in_order, self.rehearsal.seconds(costs, self.again(in_order))

    def _fitting(self, rank: int, own: Own) -> Iterator[Levels]:
        """The levels of a rank's stages with which it fits, but those where one could be higher.

        Many stages with many levels are raised together as far as they go, then one after the other.
        """
        tops = tuple(self.rehearsal.in_flight(stage) for stage in self.rehearsal.stages_of[rank])
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
        return self.rehearsal.peak(rank, own, levels) <= self.limits[rank]

    def _least_recomputed(self, rank: int, own: Own, options: Sequence[Levels]) -> Levels:
        """The levels with which a rank recomputes for the least time."""
        stages = self.rehearsal.stages_of[rank]

        def recomputes(levels: Levels) -> float:
            each = zip(stages, own, levels, strict=True)
            return sum(cost.forward * len(self.rehearsal.recomputed(stage, level)) for stage, cost, level in each)

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
    fitting = Fitting(Rehearsal(program), limits)
    if misfit := fitting.misfit(costs):
        raise ValueError(str(misfit))
    levels, _ = fitting.fastest(costs)
    return fitting.remat(levels)
