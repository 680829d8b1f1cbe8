"""Finds the least recomputation that makes stages fit in the memory of their ranks."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from math import inf, prod
from operator import attrgetter, ge, le
from typing import TypeAlias

from gpipe.planner.search.units import format_bytes
from gpipe.schedule.cost import StageCost
from gpipe.schedule.large_tables import LargeTable
from gpipe.schedule.lower import Remat, place_remat, place_transfers, recomputed
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import MicroBatches, Recomputed, Simulation, Simulator, simulate

KeptCounts: TypeAlias = tuple[int, ...]
"""For each stage (of a rank, or of all), how many micro-batches keep their activations at the same time."""
RankCosts: TypeAlias = tuple[StageCost, ...]  # the costs of the stages of one rank
MAX_COUNTS, MAX_OPTIONS = 16, 64
"""Limits for exhaustive search: the counts that are tried for the stages of one rank, and the combinations of counts
for all ranks. Above the second limit, each rank minimizes its own recomputation time."""
HOST = "the host"


@dataclass(frozen=True)
class Misfit:
    """The rank that exceeds its memory most, although everything is recomputed, or another place."""

    rank: int
    bytes: float
    limit: float
    place: str = ""  # `HOST`, or "the model" on all devices together
    is_bound: bool = False  # whether `bytes` is a lower bound
    other: "Misfit | None" = None  # a second place that exceeds its memory less

    @property
    def excess(self) -> float:
        """The ratio of needed memory to available memory."""
        return self.bytes / self.limit

    @property
    def distance(self) -> tuple[bool, float]:
        """The distance from fitting, to compare misfits. Every lower bound is farther than every simulated number."""
        return self.is_bound, self.excess * (self.other.excess if self.other else 1)

    def __str__(self) -> str:
        held = f"{'at least ' if self.is_bound else ''}{format_bytes(self.bytes)} of {format_bytes(self.limit)}"
        recomputed = "" if self.place == HOST else " with recomputation everywhere"
        other = f", and {self.other}" if self.other else ""
        return f"{self.place or f'rank {self.rank}'} needs {held}{recomputed}{other}"


def largest_misfit(held: Iterable[float], limits: Sequence[float], *, is_bound: bool = False) -> Misfit | None:
    """Returns the rank that exceeds its memory most, or None. `is_bound` is whether `held` are lower bounds."""
    ranks = enumerate(zip(held, limits, strict=True))
    misfits = [Misfit(rank, *each, is_bound=is_bound) for rank, each in ranks if each[0] > each[1]]
    return max(misfits, key=attrgetter("excess"), default=None)


class Fitting:
    """Chooses which micro-batches each stage recomputes, so that each rank stays within its memory limit."""

    def __init__(self, simulator: Simulator, limits: Sequence[float]) -> None:
        self.simulator, self.limits = simulator, limits
        self._recomputed_of = cache(self._find_recomputed)
        # Cached, because most ranks keep their layers when a partition changes.
        self._options = cache(lambda rank, costs: list(self._find_options(rank, costs)))

    def _find_recomputed(self, stage: int, count: int) -> MicroBatches:
        program = self.simulator.program
        cells = recomputed(program.table[program.rank_of[stage]], [count] * program.stages)
        return frozenset(m for other, m in cells if other == stage)

    def _by_rank(self, costs: Sequence[StageCost]) -> list[RankCosts]:
        return [tuple(costs[stage] for stage in stages) for stages in self.simulator.stages_of]

    def _peak_bytes(self, rank: int, costs: RankCosts, kept: KeptCounts) -> int:
        recomputed = map(self._recomputed_of, self.simulator.stages_of[rank], kept)
        return self.simulator.peak_bytes(rank, costs, tuple(recomputed))

    def misfit(self, costs: Sequence[StageCost]) -> Misfit | None:
        """Returns the rank that exceeds its memory most if everything is recomputed; None if all ranks fit."""
        misfits = []
        for rank, (of_rank, limit) in enumerate(zip(self._by_rank(costs), self.limits, strict=True)):
            if not self._keeps_all(rank, of_rank):
                held = self._peak_bytes(rank, of_rank, (0,) * len(of_rank))
                if held > limit:
                    misfits.append(Misfit(rank, held, limit))
        return max(misfits, key=attrgetter("excess"), default=None)

    def _keeps_all(self, rank: int, costs: RankCosts) -> bool:
        """Returns whether a rank fits without recomputation."""
        limit = self.limits[rank]
        return limit == inf or self.simulator.peak_bytes(rank, costs, (frozenset(),) * len(costs)) <= limit

    def fastest(self, costs: Sequence[StageCost]) -> tuple[KeptCounts, float]:
        """Returns the counts that make a mini-batch fastest, and its seconds.

        Call this method only if `misfit` returns None.
        """
        by_rank = self._by_rank(costs)
        options = [self._options(rank, of_rank) for rank, of_rank in enumerate(by_rank)]
        if prod(map(len, options)) > MAX_OPTIONS:
            ranks = zip(self.simulator.stages_of, by_rank, options, strict=True)
            options = [[self._least_recomputed(*rank)] for rank in ranks]
        timed = []
        for choice in product(*options):
            by_stage = sorted(zip(chain(*self.simulator.stages_of), chain(*choice), strict=True))
            kept = tuple(count for _, count in by_stage)
            timed.append((kept, self.simulator.seconds(costs, self.recomputed(kept))))
        return min(timed, key=lambda kept_and_seconds: kept_and_seconds[1])

    def busy(self, costs: Sequence[StageCost], kept: KeptCounts) -> float:
        """Returns the sum of the computation times of all ranks in seconds."""
        return self.simulator.busy(costs, self.recomputed(kept))

    def recomputed(self, kept: KeptCounts) -> Recomputed:
        """Returns the micro-batches that each stage recomputes."""
        return {stage: self._recomputed_of(stage, count) for stage, count in enumerate(kept)}

    def peaks(self, costs: Sequence[StageCost], kept: KeptCounts) -> tuple[int, ...]:
        """Returns the peak bytes of each rank."""
        ranks = enumerate(zip(self._by_rank(costs), self.simulator.stages_of, strict=True))
        return tuple(self._peak_bytes(rank, costs, tuple(kept[s] for s in stages)) for rank, (costs, stages) in ranks)

    def remat(self, kept: KeptCounts) -> tuple[Remat, ...]:
        """Returns the recomputation mode of each stage, as `GPipe` accepts it."""
        most = map(self.simulator.in_flight, range(len(kept)))
        return tuple("never" if count == top else count or "always" for count, top in zip(kept, most, strict=True))

    def _find_options(self, rank: int, costs: RankCosts) -> Iterator[KeptCounts]:
        """Yields the largest counts that fit in the memory of a rank: no count can increase."""
        most = tuple(map(self.simulator.in_flight, self.simulator.stages_of[rank]))

        def fits(kept: KeptCounts) -> bool:
            return self._peak_bytes(rank, costs, kept) <= self.limits[rank]

        def raised(kept: KeptCounts, index: int) -> KeptCounts:
            """Returns counts that fit, in which the count at `index` is as high as possible."""
            before, after = kept[:index], kept[index + 1 :]
            count = highest(kept[index], most[index], lambda count: fits((*before, count, *after)))
            return (*before, count, *after)

        if self._keeps_all(rank, costs):
            yield most
        elif prod(top + 1 for top in most[:-1]) <= MAX_COUNTS:
            options: list[KeptCounts] = []
            for firsts in product(*(range(top, -1, -1) for top in most[:-1])):
                if fits((*firsts, 0)):
                    kept = raised((*firsts, 0), len(firsts))
                    if not any(all(map(ge, other, kept)) for other in options):
                        options.append(kept)
            yield from options
        else:

            def capped(count: int) -> KeptCounts:
                return tuple(min(count, top) for top in most)

            kept = capped(highest(0, max(most), lambda count: fits(capped(count))))
            for index in range(len(most)):
                kept = raised(kept, index)
            yield kept

    def _least_recomputed(self, stages: Sequence[int], costs: RankCosts, options: Sequence[KeptCounts]) -> KeptCounts:
        def recompute_seconds(kept: KeptCounts) -> float:
            recomputed_by_stage = map(self._recomputed_of, stages, kept)
            return sum(c.recompute_seconds * len(ms) for c, ms in zip(costs, recomputed_by_stage, strict=True))

        return min(options, key=recompute_seconds)


class LargeTableFitting:
    """Does the same as `Fitting` for a `LargeTable`. Each stage recomputes all micro-batches or none.

    In `KeptCounts`, 1 means that a stage recomputes no micro-batch, and 0 means that it recomputes all micro-batches.
    """

    def __init__(self, simulator: LargeTable, limits: Sequence[float]) -> None:
        self.simulator, self.limits = simulator, limits

    def misfit(self, costs: Sequence[StageCost]) -> Misfit | None:
        """Returns the first rank that exceeds its memory if everything is recomputed; None if all ranks fit."""
        for rank, limit in enumerate(self.limits):
            held = self.simulator.peak_bytes(rank, costs, range(len(costs)))
            if held > limit:
                return Misfit(rank, held, limit)
        return None

    def fastest(self, costs: Sequence[StageCost]) -> tuple[KeptCounts, float]:
        """Returns the counts of all stages, and the seconds of a mini-batch.

        A rank recomputes only if it does not fit otherwise.
        """
        fits = [self.simulator.peak_bytes(rank, costs) <= limit for rank, limit in enumerate(self.limits)]
        kept = tuple(int(fits[rank]) for rank in self.simulator.rank_of)
        return kept, self.simulator.seconds(costs, self._recomputed(kept))

    def busy(self, costs: Sequence[StageCost], kept: KeptCounts) -> float:
        return self.simulator.busy(costs, self._recomputed(kept))

    def peaks(self, costs: Sequence[StageCost], kept: KeptCounts) -> tuple[int, ...]:
        stages = self._recomputed(kept)
        return tuple(self.simulator.peak_bytes(rank, costs, stages) for rank in range(len(self.limits)))

    def remat(self, kept: KeptCounts) -> tuple[Remat, ...]:
        return tuple("never" if count else "always" for count in kept)

    def _recomputed(self, kept: KeptCounts) -> frozenset[int]:
        return frozenset(stage for stage, count in enumerate(kept) if not count)


def highest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Returns the highest number that fits, by bisection.

    `low` must fit, and all numbers below a fitting number fit.
    """
    return low + bisect_right(range(low + 1, high + 1), False, key=lambda number: not fits(number))


def fitting_remat(program: Program, costs: Sequence[StageCost], limits: Sequence[float]) -> tuple[Remat, ...]:
    """Returns the recomputation mode of each stage. Recomputes as little as the memory limits of the ranks permit."""
    fitting = Fitting(Simulator(program), limits)
    if misfit := fitting.misfit(costs):
        raise ValueError(str(misfit))
    kept, _ = fitting.fastest(costs)
    return fitting.remat(kept)


def _run(program: Program, costs: Sequence[StageCost], remat: Sequence[Remat]) -> Simulation:
    return simulate(place_transfers(place_remat(program, remat)), costs)


def fits(program: Program, costs: Sequence[StageCost], limits: Sequence[float], remat: Sequence[Remat]) -> bool:
    """Returns whether every rank stays within its memory limit in bytes, with these recomputation modes."""
    return all(map(le, _run(program, costs, remat).peak_bytes, limits))


def choose_offload(
    program: Program, costs: Sequence[StageCost], limits: Sequence[float], remat: tuple[Remat, ...]
) -> tuple[Remat, ...]:
    """Replaces modes in `remat` by `"offload"`, at stages where this fits and does not make the step slower.

    Does not try `"offload_inputs"`: this mode recomputes all micro-batches and adds copies, so it cannot make a step
    faster. It only saves memory, and the modes in `remat` already fit.

    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> costs = [StageCost(1.0, 2.0, move=5.0, activations=8), StageCost(1.0, 2.0, move=0.5, activations=8)]
    >>> choose_offload(program_of("gpipe", 2, 8), costs, [16, 16], ("always", "always"))
    ('always', 'offload')
    """

    def run(remat: tuple[Remat, ...]) -> tuple[bool, float]:
        simulation = _run(program, costs, remat)
        return all(map(le, simulation.peak_bytes, limits)), simulation.timeline.seconds

    possible = [stage for stage, cost in enumerate(costs) if cost.move and remat[stage] != "never"]
    least = run(remat)[1] if possible else 0.0
    for stage in possible:
        changed: tuple[Remat, ...] = (*remat[:stage], "offload", *remat[stage + 1 :])
        fits, seconds = run(changed)
        if fits and seconds <= least:
            remat, least = changed, seconds
    return remat
