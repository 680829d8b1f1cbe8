"""Lists the candidates for a plan, without split points: ranks, micro-batches, schedule. Also bounds their time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf, isqrt

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

AUTO = "auto"  # the name of a schedule that is searched for
STAGES_PER_RANK, MANY_RANKS = (1, 2, 4), 9
"""The numbers of stages per rank that are tried for 2 to `MANY_RANKS` - 1 ranks. Otherwise, only the default is
tried."""
HOST_WEIGHTS = "breadth_first"  # the schedule for weights on the host: it loads each stage at most twice
SCHEDULES_OF_ONE_RANK = ("gpipe", "1f1b")
"""The schedules that are tried for one rank: all forwards first, or with less memory one micro-batch at a time."""
MAX_RANKS_TRIED = 16  # every number of ranks up to this one is tried; see `_rank_counts` for larger ones
ENOUGH_MICRO_BATCHES_PER_RANK = 32
"""With this many micro-batches per rank, fill-drain idles 1/33 of the time. More micro-batches save at most 3 %."""
LARGE = 300_000  # a table with more actions is a `LargeTable`
FEW_RANKS = 4  # the idle share with this many ranks is similar to the one with more ranks


@dataclass(frozen=True)
class Shape:
    """A plan without its split points and recomputation."""

    partitions: int
    micro_batches: int
    schedule: str
    stages_per_rank: int = 1
    resident: int | None = None  # the loaded stages of a rank, if the weights are on the host

    def __str__(self) -> str:
        stages = f", {self.stages_per_rank} stages per rank" if self.stages_per_rank > 1 else ""
        host = "" if self.resident is None else f", weights on the host (resident={self.resident})"
        return f"K={self.partitions} M={self.micro_batches} {self.schedule}{stages}{host}"

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.partitions * self.stages_per_rank

    @property
    def actions(self) -> int:
        """The approximate number of forwards and backwards in a mini-batch."""
        return self.stages * self.micro_batches * (3 if self.splits else 2)

    @property
    def splits(self) -> bool:
        """Whether backwards may be split."""
        return self.schedule == AUTO or splits(self.schedule)

    @property
    def rank_of(self) -> Placement | None:
        """The rank of each stage. None if the schedule does not support this number of stages per rank."""
        return SCHEDULES[self.schedule].placement(self.partitions, self.stages_per_rank)

    def _table(self) -> Table | None:
        return SCHEDULES[self.schedule].table(self.rank_of, self.micro_batches) if self.rank_of else None

    def program(self) -> Program | None:
        """Returns the program of forwards and backwards. None if the schedule does not support this size."""
        table = self._table()
        return join_backwards(Program.of(table, self.micro_batches, rank_of=self.rank_of)) if table else None

    def large_table(self) -> LargeTable | None:
        """Returns the actions as a `LargeTable`, if there are more than `LARGE` actions."""
        rows = self._table() if self.actions > LARGE else None
        return LargeTable(rows, self.rank_of, joined=True) if isinstance(rows, Rows) and self.rank_of else None


@dataclass(frozen=True)
class Choices:
    """The values that a search may choose. None means all possible values.

    Attributes:
        partitions: Numbers of ranks.
        micro_batches: Numbers of micro-batches.
        schedules: Names of schedules.
        least_rows: The minimum number of rows of a micro-batch, unless `micro_batches` is set or M is 1. Default: 1.
        weights: `"device"` or `"host"`. None (default): on the host only if no other plan fits.
        host_memory: Bytes of the host, for weights on the host. Default: unlimited.
    """

    partitions: Sequence[int] | None = None
    micro_batches: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    least_rows: int = 1
    weights: str | None = None
    host_memory: float = inf

    def mistakes(self, devices: float, global_batch: object) -> Iterator[str]:
        """Yields an error message for each choice that is invalid for these devices and rows."""
        for k in self.partitions or ():
            if not is_count(k):
                remedy = "To set the layers of each stage, also pass balance=."
                yield f"partitions={k!r} is not a number of ranks. Use an integer >= 1{int_remedy(k)}. {remedy}"
            elif k > devices:
                yield f"partitions={k} exceeds the number of devices. Use 1 to {devices}."
        for m in self.micro_batches or ():
            if not is_count(m):
                yield f"micro_batches={m!r} is not a number of micro-batches. Use an integer >= 1{int_remedy(m)}."
            elif isinstance(global_batch, int) and global_batch % m:
                yield f"micro_batches={m} does not divide global_batch={global_batch}. Use a divisor."
            elif m > MAX_MICRO_BATCHES:
                yield too_many_micro_batches(m)
        for name in self.schedules or ():
            if not isinstance(name, str):
                yield f"schedule={name!r} is not a name. Use a name, or None to compare all schedules."
            elif name not in (*SCHEDULES, AUTO):
                yield unknown_schedule(name, AUTO)
        yield from self._host_mistakes()
        if not is_count(global_batch):
            rows = f"global_batch={global_batch!r}"
            yield f"{rows} is not a number of rows. Use an integer >= 1{int_remedy(global_batch)}."

    def _host_mistakes(self) -> Iterator[str]:
        if self.weights not in (None, "device", "host"):
            yield f"weights={self.weights!r} is unknown. Pass 'device', 'host', or None to choose."
        if type(self.host_memory) not in (int, float) or not self.host_memory > 0:
            yield f"host_memory={self.host_memory!r} is not positive. Pass the number of bytes."
        others = [name for name in self.schedules or () if name not in (AUTO, HOST_WEIGHTS)]
        if self.weights == "host" and others:
            yield f"weights='host' does not support schedule={others[0]!r}. Remove schedule=."

    def shapes(self, devices: int, global_batch: int, layers: int, *, beyond: bool = False) -> Iterator[Shape]:
        """Yields all shapes, simple shapes first. Every M divides the mini-batch, so micro-batches are equally large.

        Args:
            devices: The number of devices.
            global_batch: The rows of a mini-batch.
            layers: The number of layers.
            beyond: Whether to yield, instead of the usual shapes, the shapes that only help if memory is short. These
                have more micro-batches, or one rank with several stages that are recomputed separately. Default:
                False.
        """
        for partitions in self.partitions or _rank_counts(min(devices, layers)):
            enough = ENOUGH_MICRO_BATCHES_PER_RANK * partitions
            if beyond and partitions == 1 and self.schedules is None:
                sizes = product(self._micro_batches(global_batch, enough, beyond=False), STAGES_PER_RANK[1:])
                yield from (Shape(1, m, "interleaved", stages) for m, stages in sizes)
            for m in self._micro_batches(global_batch, enough, beyond=beyond):
                for name in self.schedules or (SCHEDULES if partitions > 1 else SCHEDULES_OF_ONE_RANK):
                    tries_all = 1 < partitions < MANY_RANKS
                    for stages in STAGES_PER_RANK if tries_all else (SCHEDULES[name].stages_per_rank,):
                        if SCHEDULES[name].placement(partitions, stages) and (stages == 1 or name != "gpipe"):
                            yield Shape(partitions, m, name, stages)

    def shapes_with_host_weights(self, devices: int, global_batch: int, layers: int) -> Iterator[Shape]:
        """Yields shapes for weights on the host, with 2, 4, 8, ... stages per rank, or with one layer per stage."""
        if HOST_WEIGHTS not in (self.schedules or (HOST_WEIGHTS,)):
            return
        for partitions in self.partitions or _rank_counts(min(devices, layers // 2)):
            most = layers // partitions
            each = sorted({1 << power for power in range(1, most.bit_length())} | {most} - {0, 1})
            for m in self._micro_batches(global_batch, ENOUGH_MICRO_BATCHES_PER_RANK * partitions, beyond=False):
                yield from (Shape(partitions, m, HOST_WEIGHTS, stages) for stages in each)

    def _micro_batches(self, global_batch: int, enough: int, *, beyond: bool) -> Sequence[int]:
        if self.micro_batches:
            return () if beyond else self.micro_batches
        divisors = _divisors(global_batch)
        end = 1 + sum(divisor < enough for divisor in divisors)  # includes the first divisor that is enough
        selected = divisors[end:] if beyond else divisors[:end]
        return [m for m in selected if m <= MAX_MICRO_BATCHES and (m == 1 or global_batch // m >= self.least_rows)]


def _rank_counts(most: int) -> list[int]:
    """Returns all numbers up to `MAX_RANKS_TRIED`. Above, returns powers of two, and `most` halved repeatedly.

    >>> _rank_counts(100)
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 25, 32, 50, 64, 100]
    """
    beyond = {number for times in range(most.bit_length()) for number in (1 << times, most >> times)}
    return sorted({*range(1, min(MAX_RANKS_TRIED, most) + 1), *beyond})


@cache
def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def least_seconds(shape: Shape, sized: SizedProfile, speeds: Sequence[float]) -> float:
    """Returns a lower bound on the time of all partitions of a shape.

    The bound is the larger of two times: all work divided evenly among the ranks, and one micro-batch in all layers.
    """
    fastest = max(speeds)
    path, work, largest = sized.least_split if splits(shape.schedule) else sized.least_joined
    return max(path / fastest, shape.micro_batches * max(work / sum(speeds), largest / fastest))


@cache
def splits(schedule: str) -> bool:
    """Returns whether a schedule splits backwards, so that weight gradients need not delay the preceding stages."""
    program = program_of(schedule, ranks=2, micro_batches=4)
    return any(action.kind is Kind.BACKWARD_INPUT for action in program.actions)


def likely_seconds(shape: Shape, sized: SizedProfile, speeds: Sequence[float]) -> float:
    """Returns an estimate of the time if ranks have equal work, nothing is recomputed, and everything fits.

    To save time, the idle share is computed for at most `FEW_RANKS` ranks, with the same number of micro-batches per
    rank.
    """
    ranks = min(shape.partitions, FEW_RANKS)
    m = max(1, round(shape.micro_batches * ranks / shape.partitions))
    small = replace(shape, partitions=ranks, micro_batches=m)
    work = shape.micro_batches * sum(sized.work) / sum(speeds)
    return max(least_seconds(shape, sized, speeds), work / (1 - _idle_share(small)))


@cache
def _idle_share(shape: Shape) -> float:
    program, costs = shape.program(), [UNIT_COST] * shape.stages
    if program is None:
        return 0.0
    simulator = Simulator(program)
    return 1 - simulator.busy(costs, {}) / (shape.partitions * simulator.seconds(costs))
