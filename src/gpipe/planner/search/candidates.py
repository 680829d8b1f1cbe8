"""What a plan may be before layers are cut: its ranks, micro-batches and schedule; and the least that it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import isqrt
from operator import add

from gpipe.errors import int_remedy, is_count
from gpipe.planner.search.profile import SizedProfile
from gpipe.schedule.action import Kind
from gpipe.schedule.large_tables import LargeTable
from gpipe.schedule.lower import join_backwards
from gpipe.schedule.program import MAX_MICRO_BATCHES, Program, Table, too_many_micro_batches
from gpipe.schedule.schedules import SCHEDULES, Placement
from gpipe.schedule.schedules.by_name import program_of, unknown_schedule
from gpipe.schedule.schedules.writing import Rows
from gpipe.schedule.simulate import UNIT_COST, Simulator

AUTO = "auto"  # the schedule whose table is searched for
STAGES_PER_RANK, MANY_RANKS = (1, 2, 4), 9
"""How many stages a rank is given, where a schedule leaves it open; of so many ranks and of one, only its default."""
SCHEDULES_OF_ONE_RANK = ("gpipe", "1f1b")
"""The schedules of one rank, where none is settled: all forwards first, or with less memory one after the other."""
MOST_RANKS_TRIED = 16  # up to so many ranks every number is tried; beyond, those of `_rank_counts`
ENOUGH_MICRO_BATCHES_PER_RANK = 32
"""Micro-batches for each rank, beyond which at most 3 % of the time is still to be had: 1/33 idle with fill-drain."""
LARGE = 300_000  # so many actions of a table are not listed one by one
FEW_RANKS = 4  # on which the share of idle time is about that on more


@dataclass(frozen=True)
class Shape:
    """All of a plan but its cuts and remat."""

    partitions: int
    micro_batches: int
    schedule: str
    stages_per_rank: int = 1

    def __str__(self) -> str:
        each = f", {self.stages_per_rank} stages a rank" if self.stages_per_rank > 1 else ""
        return f"K={self.partitions} M={self.micro_batches} {self.schedule}{each}"

    @property
    def stages(self) -> int:
        """How many stages the layers are cut into."""
        return self.partitions * self.stages_per_rank

    @property
    def actions(self) -> int:
        """About how many forwards and backwards its table has."""
        return self.stages * self.micro_batches * (3 if self.splits else 2)

    @property
    def splits(self) -> bool:
        """Whether its backwards may be split."""
        return self.schedule == AUTO or splits(self.schedule)

    @property
    def rank_of(self) -> Placement | None:
        """The rank of each stage; None if the schedule cannot place so many."""
        return SCHEDULES[self.schedule].placement(self.partitions, self.stages_per_rank)

    def _table(self) -> Table | None:
        return SCHEDULES[self.schedule].table(self.rank_of, self.micro_batches) if self.rank_of else None

    def program(self) -> Program | None:
        """The table of forwards and backwards, as it is run; None if the schedule has none of this size."""
        table = self._table()
        return join_backwards(Program.of(table, self.micro_batches, rank_of=self.rank_of)) if table else None

    def large_table(self) -> LargeTable | None:
        """Its rows, as they are run, if their actions are too many to be listed."""
        rows = self._table() if self.actions > LARGE else None
        return LargeTable(rows, self.rank_of, joined=True) if isinstance(rows, Rows) and self.rank_of else None


@dataclass(frozen=True)
class Choices:
    """What a plan may be; None: anything."""

    partitions: Sequence[int] | None = None
    micro_batches: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    least_rows: int = 1  # of each micro-batch, where M is not settled and there is more than one

    def mistakes(self, devices: float, global_batch: object) -> Iterator[str]:
        """What of it, and which number of rows, cannot be on so many devices."""
        for k in self.partitions or ():
            if not is_count(k):
                yield f"partitions={k!r}; give K, a whole number of at least 1{int_remedy(k)}; cuts are found"
            elif k > devices:
                yield f"partitions={k}; give numbers from 1 to {devices}, as many as there are devices"
        for m in self.micro_batches or ():
            if not is_count(m):
                yield f"micro_batches={m!r}; give M, a whole number of at least 1{int_remedy(m)}"
            elif isinstance(global_batch, int) and global_batch % m:
                yield f"micro_batches={m}; give numbers that divide global_batch={global_batch}"
            elif m > MAX_MICRO_BATCHES:
                yield too_many_micro_batches(m)
        for name in self.schedules or ():
            if not isinstance(name, str):
                yield f"schedule={name!r}; give the name of one, or leave it out to have the fastest"
            elif name not in (*SCHEDULES, AUTO):
                yield unknown_schedule(name, AUTO)
        if not is_count(global_batch):
            remedy = int_remedy(global_batch)
            yield f"global_batch={global_batch!r}; give the rows of a mini-batch, at least 1{remedy}"

    def shapes(self, devices: int, global_batch: int, layers: int, *, beyond: bool = False) -> Iterator[Shape]:
        """All shapes, the simpler first; each M divides the mini-batch, so that all micro-batches are of one size.

        With `beyond` those for which only memory may ask: of more micro-batches than are enough, and of one rank with
        several stages, which recompute one after the other.
        """
        for partitions in self.partitions or _rank_counts(min(devices, layers)):
            enough = ENOUGH_MICRO_BATCHES_PER_RANK * partitions
            if beyond and partitions == 1 and self.schedules is None:
                several = product(self._micro_batches(global_batch, enough, beyond=False), STAGES_PER_RANK[1:])
                yield from (Shape(1, m, "interleaved", each) for m, each in several)
            for m in self._micro_batches(global_batch, enough, beyond=beyond):
                for name in self.schedules or (SCHEDULES if partitions > 1 else SCHEDULES_OF_ONE_RANK):
                    every = 1 < partitions < MANY_RANKS
                    for each in STAGES_PER_RANK if every else (SCHEDULES[name].stages_per_rank,):
                        if SCHEDULES[name].placement(partitions, each) and (each == 1 or name != "gpipe"):
                            yield Shape(partitions, m, name, each)

    def _micro_batches(self, global_batch: int, enough: int, *, beyond: bool) -> Sequence[int]:
        if self.micro_batches:
            return () if beyond else self.micro_batches
        divisors = _divisors(global_batch)
        end = 1 + sum(divisor < enough for divisor in divisors)  # with the first that is enough
        found = divisors[end:] if beyond else divisors[:end]
        return [m for m in found if m <= MAX_MICRO_BATCHES and (m == 1 or global_batch // m >= self.least_rows)]


def _rank_counts(most: int) -> list[int]:
    """Every number of ranks up to `MOST_RANKS_TRIED`, powers of two, and the most that there can be and halves of it.

    >>> _rank_counts(100)
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 25, 32, 50, 64, 100]
    """
    beyond = {number for times in range(most.bit_length()) for number in (1 << times, most >> times)}
    return sorted({*range(1, min(MOST_RANKS_TRIED, most) + 1), *beyond})


@cache
def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def least_seconds(shape: Shape, sized: SizedProfile, speeds: Sequence[float]) -> float:
    """A time that no cuts of this shape go below: of all work shared evenly, and of the way through all layers."""
    m, fastest = shape.micro_batches, max(speeds)
    whole = path = sized.backward
    if splits(shape.schedule):
        path = [min(inputs, back) for (inputs, _), back in zip(sized.parts, sized.backward, strict=True)]
        whole = [min(sum(parts), back) for parts, back in zip(sized.parts, sized.backward, strict=True)]
    work: list[float] = list(map(add, sized.forward, whole))
    slowest = max(sum(work) / sum(speeds), max(work) / fastest)
    return max((sum(sized.forward) + sum(path)) / fastest, m * slowest)


@cache
def splits(schedule: str) -> bool:
    """Whether a schedule splits backwards, so that none of their halves for the weights need lie on the way back."""
    program = program_of(schedule, ranks=2, micro_batches=4)
    return any(action.kind is Kind.BACKWARD_INPUT for action in program.actions)


def likely_seconds(shape: Shape, sized: SizedProfile, speeds: Sequence[float]) -> float:
    """About the time if all ranks had the same work, nothing were recomputed and everything fitted.

    The idle share is that of a table of fewer ranks, with as many micro-batches for each; it is about the same.
    """
    ranks = min(shape.partitions, FEW_RANKS)
    m = max(1, round(shape.micro_batches * ranks / shape.partitions))
    few = replace(shape, partitions=ranks, micro_batches=m)
    work = shape.micro_batches * sum(sized.work) / sum(speeds)
    return max(least_seconds(shape, sized, speeds), work / (1 - _idle_share(few)))


@cache
def _idle_share(shape: Shape) -> float:
    program, costs = shape.program(), [UNIT_COST] * shape.stages
    if program is None:
        return 0.0
    simulator = Simulator(program)
    return 1 - simulator.busy(costs, {}) / (shape.partitions * simulator.seconds(costs))
