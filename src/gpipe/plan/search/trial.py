"""Tries cuts of a shape: what has to be recomputed for them to fit, and how long a mini-batch then takes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise, product
from math import prod
from operator import ge

from gpipe.plan.action import Kind
from gpipe.plan.cost import StageCost
from gpipe.plan.lower import Remat
from gpipe.plan.program import Program
from gpipe.plan.search.device import Device, bytes_text
from gpipe.plan.search.profile import SizedProfile, bounds
from gpipe.plan.search.rehearsal import Cell, Rehearsal
from gpipe.plan.search.shapes import Shape

Levels = tuple[int, ...]
"""Of each stage, how many micro-batches at once keep what is inside."""
MOST_LEVELS, MOST_OPTIONS = 16, 64
"""Up to so many ways to share the memory of a rank among its stages, and to choose among these ways on all ranks, all
are tried; beyond, each rank recomputes for the least time."""


@dataclass(frozen=True)
class Settled:
    """Cuts that fit, with what is recomputed."""

    layers: tuple[int, ...]
    costs: tuple[StageCost, ...]
    levels: Levels
    seconds: float


@dataclass(frozen=True)
class Misfit:
    """Cuts that do not fit, though everything is recomputed: the rank that is furthest over what its device holds."""

    rank: int
    bytes: float
    limit: float

    @property
    def excess(self) -> float:
        """How many times what the device holds is needed."""
        return self.bytes / self.limit

    def __str__(self) -> str:
        return f"rank {self.rank} needs {bytes_text(self.bytes)} of {bytes_text(self.limit)}, all recomputed"


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
    def rehearsal(self) -> Rehearsal:
        """The table, to be timed."""
        return Rehearsal(self.program)

    @cached_property
    def splits(self) -> bool:
        """Whether some backwards are split in two."""
        return any(action.kind is Kind.BACKWARD_INPUT for action in self.program.actions)

    @property
    def stages_of(self) -> list[list[int]]:
        """The stages of each rank."""
        return self.rehearsal.stages_of

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
        begins = {rank: stages[0] for rank, stages in enumerate(self.stages_of)}
        m = self.shape.micro_batches
        for stage, cost in enumerate(costs):
            rank = self.program.rank_of[stage]
            if begins[rank] == stage:
                work = m * sum(costs[own].forward + costs[own].backward for own in self.stages_of[rank])
                found = max(found, ahead + work + (0.0 if self.splits else back))
            ahead += cost.forward + cost.send
            back += cost.backward + (costs[stage + 1].send_gradient or 0.0 if stage + 1 < len(costs) else 0.0)
        return max(found, ahead)

    def settle(self, layers: tuple[int, ...], costs: tuple[StageCost, ...]) -> Settled | Misfit:
        """Finds what each stage recomputes, no more than memory demands, and times the mini-batch."""
        ranks = range(self.program.ranks)
        options = [list(self._fitting(rank, costs)) for rank in ranks]
        if not all(options):
            return max(
                (self._misfit(rank, costs) for rank in ranks if not options[rank]), key=lambda misfit: misfit.excess
            )
        if prod(map(len, options)) > MOST_OPTIONS:
            options = [
                [min(own, key=partial(self._recompute_seconds, rank, costs))] for rank, own in enumerate(options)
            ]
        timed = (self._timed(layers, costs, choice) for choice in product(*options))
        return min(timed, key=lambda settled: settled.seconds)

    def _misfit(self, rank: int, costs: Sequence[StageCost]) -> Misfit:
        nothing = (0,) * len(self.stages_of[rank])
        return Misfit(rank, self._peak(rank, costs, nothing), self.devices[rank].memory)

    def _timed(self, layers: tuple[int, ...], costs: tuple[StageCost, ...], choice: Sequence[Levels]) -> Settled:
        """Cuts with the levels that each rank has chosen for its stages."""
        again: set[Cell] = set()
        levels = dict[int, int]()
        for rank, own in enumerate(choice):
            again |= self._again(rank, own)
            levels |= zip(self.stages_of[rank], own, strict=True)
        in_order = tuple(levels[stage] for stage in range(self.program.stages))
        return Settled(layers, costs, in_order, self.rehearsal.seconds(costs, again))

    def _fitting(self, rank: int, costs: Sequence[StageCost]) -> Iterator[Levels]:
        """The levels of a rank's stages with which it fits, but those where one could be higher; none: it does not.

        Many stages with many levels are raised together as far as they go, then one after the other.
        """
        tops = tuple(self.rehearsal.in_flight(stage) for stage in self.stages_of[rank])
        nothing = (0,) * len(tops)
        if self._fits(rank, costs, tops):
            yield tops
        elif not self._fits(rank, costs, nothing):
            return
        elif prod(top + 1 for top in tops[:-1]) <= MOST_LEVELS:
            found: list[Levels] = []
            for firsts in product(*(range(top, -1, -1) for top in tops[:-1])):
                if self._fits(rank, costs, (*firsts, 0)):
                    levels = self._raised(rank, costs, (*firsts, 0), len(firsts), tops[-1])
                    if not any(all(map(ge, other, levels)) for other in found):
                        found.append(levels)
            yield from found
        else:
            level = highest(0, max(tops), lambda level: self._fits(rank, costs, _capped(level, tops)))
            levels = _capped(level, tops)
            for at, top in enumerate(tops):
                levels = self._raised(rank, costs, levels, at, top)
            yield levels

    def _raised(self, rank: int, costs: Sequence[StageCost], levels: Levels, at: int, top: int) -> Levels:
        """The levels, with which the rank fits, with one of them as high as that goes."""

        def raised(level: int) -> Levels:
            return (*levels[:at], level, *levels[at + 1 :])

        return raised(highest(levels[at], top, lambda level: self._fits(rank, costs, raised(level))))

    def _fits(self, rank: int, costs: Sequence[StageCost], levels: Levels) -> bool:
        return self._peak(rank, costs, levels) <= self.devices[rank].memory

    def _peak(self, rank: int, costs: Sequence[StageCost], levels: Levels) -> int:
        return self.rehearsal.peak(rank, costs, levels)

    def _again(self, rank: int, levels: Levels) -> set[Cell]:
        """What a rank recomputes."""
        own = zip(self.stages_of[rank], levels, strict=True)
        return {cell for stage, level in own for cell in self.rehearsal.recomputed(stage, level)}

    def _recompute_seconds(self, rank: int, costs: Sequence[StageCost], levels: Levels) -> float:
        return sum(costs[stage].forward for stage, _ in self._again(rank, levels))

    def remat(self, settled: Settled) -> tuple[Remat, ...]:
        """What is recomputed, in the words of `GPipe`."""
        return tuple(
            "never" if level == self.rehearsal.in_flight(stage) else level or "always"
            for stage, level in enumerate(settled.levels)
        )

    def peaks(self, settled: Settled) -> tuple[int, ...]:
        """The most bytes that each rank holds."""
        return tuple(self._peak(rank, settled.costs, own) for rank, own in enumerate(self._by_rank(settled)))

    def again(self, settled: Settled) -> set[Cell]:
        """What all ranks recompute."""
        return {cell for rank, own in enumerate(self._by_rank(settled)) for cell in self._again(rank, own)}

    def _by_rank(self, settled: Settled) -> list[Levels]:
        return [tuple(settled.levels[stage] for stage in stages) for stages in self.stages_of]


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
