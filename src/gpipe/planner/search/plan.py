"""What a search found: the plan, the next best, and why the others were rejected."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise, zip_longest
from math import inf
from typing import Any, Literal

from gpipe.planner.search.candidates import Shape
from gpipe.planner.search.device import Device
from gpipe.planner.search.profile import bounds
from gpipe.planner.search.units import format_bytes, format_seconds
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat, join_backwards, place_remat, place_transfers
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program, notebook_html
from gpipe.schedule.schedules import SCHEDULES, Placement, table_in_training
from gpipe.schedule.schedules.by_name import Interleaved, Named, Sliced, schedule_of, schedule_of_program
from gpipe.schedule.simulate import Simulation, simulate

CostsBy = Literal["time", "operations", "params", "flops", "function", "numbers"]
Reason = Literal["slower", "too big", "more stages than layers", "no table of this size"]

NOISE_SECONDS = 1e-4  # about what a runtime adds to a micro-batch at a stage; costs below it say little
LEAST_SHARE_TOLD = 5e-4  # the least share of a plan's seconds that stands on what it explains


@dataclass(frozen=True)
class Rejection:
    """Why a shape was not taken.

    >>> print(Rejection(Shape(2, 4, "1f1b"), "slower", "takes 2 s at least"))
    K=2 M=4 1f1b: takes 2 s at least
    """

    shape: Shape
    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.shape}: {self.detail or self.reason}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a network is trained: plain data, which `gpipe.GPipe(model, plan=plan)` follows.

    `gpipe.find_plan` returns one, `GPipe.plan` is the one that a pipe follows, and a checkpoint stores it.

    Attributes:
        micro_batches: M.
        layers_per_partition: The layers of each stage.
        rank_of: The rank of each stage.
        schedule: By name.
        slices: How many slices each micro-batch of a step is cut into.
        table: Of what each rank does, where that is no schedule by name: it was searched for, then `schedule` is
            `"auto"`, or it was given.
        remat: Of each stage: `"never"`, `"always"`, or how many micro-batches at once keep what is inside.
        unsplit: The stages whose backwards are not split; None until a pipe decides.
        names: Of the layers.
        work: What each layer costs: forward and backward of a micro-batch.
        costs: Of the stages.
        costs_by: How these were obtained: `"time"`, measured seconds; `"operations"`, of devices' FLOP/s; or, where
            only proportions count, `"params"`, `"flops"`, a `"function"` or `"numbers"` that were given.
        counted: Whether the bytes that stages hold were counted.
        seconds: Of a mini-batch, but for its data and the optimizer; in the unit of `costs`.
        peak_bytes: The most that each rank holds: state of its layers, and activations.
        bubble: The share of rank-seconds in which nothing is computed, the imbalance of the stages included.
        global_batch: The rows of a mini-batch; 0 where they are not known.
        devices: Of the ranks, where it was planned for some.
        least_seconds: That no table of these stages goes below, where one was searched for.
        plain_seconds: Of the same mini-batch in plain torch with all these cores, where that was measured.
        alternatives: The next best, of other shapes.
        rejected: Why all others were not taken.

    >>> from gpipe.planner.search.profile import LayerProfile, Line, Profile
    >>> from gpipe.planner.search.search import search
    >>> from gpipe.planner.search.candidates import Choices
    >>> layer = LayerProfile("layer", forward=Line(per_row=1e9), backward=Line(per_row=2e9))
    >>> devices = [Device(flops=1e9)] * 2
    >>> plan = search(Profile((layer,) * 4), devices, global_batch=4, choices=Choices(schedules=["1f1b"]))
    >>> print(plan.explain().splitlines()[0])
    K=2 M=4 1f1b: 30.0 s for 4 rows, 0.133333 rows/s
    """

    micro_batches: int
    layers_per_partition: tuple[int, ...]
    rank_of: Placement
    schedule: str
    remat: tuple[Remat, ...]
    names: tuple[str, ...] = field(repr=False)
    work: tuple[float, ...] = field(repr=False)
    costs: tuple[StageCost, ...] = field(repr=False)
    costs_by: CostsBy = "operations"
    counted: bool = True
    slices: int = 1
    table: Program | None = field(default=None, repr=False)
    unsplit: frozenset[int] | None = None
    seconds: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    bubble: float = 0.0
    global_batch: int = 0
    devices: tuple[Device, ...] = field(default=(), repr=False)
    least_seconds: float | None = None
    plain_seconds: float | None = None
    alternatives: tuple["Plan", ...] = field(default=(), repr=False)
    rejected: tuple[Rejection, ...] = field(default=(), repr=False)

    @property
    def partitions(self) -> int:
        """K, how many ranks there are."""
        return max(self.rank_of) + 1

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank holds."""
        return len(self.rank_of) // self.partitions

    @property
    def measured(self) -> bool:
        """Whether costs are measured seconds."""
        return self.costs_by == "time"

    @property
    def recomputes(self) -> bool:
        """Whether a stage may run a forward again."""
        return any(remat not in ("never", "offload") for remat in self.remat)

    @property
    def shape(self) -> Shape:
        """All but the cuts and the remat."""
        return Shape(self.partitions, self.micro_batches, self.schedule, self.stages_per_rank)

    @cached_property
    def partition(self) -> Partition:
        """The cuts, by what layers cost."""
        return Partition.of_sizes(self.layers_per_partition, self.work)

    @cached_property
    def rank_seconds(self) -> tuple[float, ...]:
        """What the stages of each rank cost together, in the unit of `work`."""
        totals = [0.0] * self.partitions
        for rank, cost in zip(self.rank_of, self.partition.seconds, strict=True):
            totals[rank] += cost
        return tuple(totals)

    def as_schedule(self) -> Named | Program:
        """The table, or what names it, as `gpipe.GPipe` takes a schedule."""
        if self.table is not None:
            return self.table
        each = SCHEDULES[self.schedule].stages_per_rank
        found = self.schedule if each == self.stages_per_rank else Interleaved(self.stages_per_rank, self.schedule)
        return found if self.slices == 1 else Sliced(found, self.slices)

    def of_micro_batches(self, micro_batches: int) -> "Plan":
        """The same cuts and table for another M, whose micro-batches cost in proportion; their bytes are unknown."""
        share = micro_batches / self.micro_batches
        if share == 1:
            return self
        costs = tuple(cost.divided_by(share) for cost in self.costs)
        work = tuple(each / share for each in self.work)
        table = self.table
        if table is not None:
            rows = schedule_of_program(table).table(self.rank_of, micro_batches) or ()
            table = Program.of(rows, micro_batches, rank_of=self.rank_of)
        other = replace(self, micro_batches=micro_batches, costs=costs, work=work, table=table, counted=False)
        return replace(other, unsplit=None, least_seconds=None, plain_seconds=None, alternatives=(), rejected=())

    def timed(self) -> "Plan":
        """The same with seconds, peak bytes and bubble, by the simulator."""
        found = self.simulation
        peaks = found.peak_bytes if self.counted else ()
        seconds, bubble = found.timeline.seconds, found.timeline.idle_share()
        return replace(self, seconds=seconds, peak_bytes=peaks, bubble=bubble)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON that `from_json` reads back, but for alternatives and rejected ones."""
        own = {name: value for name, value in vars(self).items() if name in _STORED and value is not None}
        table = {} if self.table is None else {"table": self.table.to_text().splitlines()}
        unsplit = {} if self.unsplit is None else {"unsplit": sorted(self.unsplit)}
        devices = [[None if number == inf else number for number in astuple(device)] for device in self.devices]
        return {**own, **table, **unsplit, "costs": [*map(astuple, self.costs)], "devices": devices}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Plan":
        """Reads what `to_json` gave; ValueError if it is of another form."""
        try:
            own: dict[str, Any] = {name: stored[name] for name in _STORED & stored.keys()}
            own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
            if "table" in stored:
                own["table"] = Program.from_text("\n".join(stored["table"]))
            if "unsplit" in stored:
                own["unsplit"] = frozenset(stored["unsplit"])
            found = cls(
                **own,
                costs=tuple(StageCost(*numbers) for numbers in stored["costs"]),
                devices=tuple(_read_device(numbers) for numbers in stored["devices"]),
            )
            assert sum(found.layers_per_partition) == len(found.names) == len(found.work)
            assert len(found.layers_per_partition) == len(found.rank_of) == len(found.remat) == len(found.costs)
        except (AssertionError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"there is no plan that is written like this: {error}") from None
        return found

    @property
    def rows_per_second(self) -> float:
        """The throughput."""
        return self.global_batch / self.seconds

    @property
    def communication(self) -> float:
        """The seconds of a mini-batch in which the busiest link of two ranks carries messages in one direction."""
        links: defaultdict[tuple[int, int], float] = defaultdict(float)
        for stage, (before, after) in enumerate(pairwise(self.rank_of)):
            if before != after:
                links[before, after] += self.costs[stage].send
                links[after, before] += self.costs[stage + 1].send_gradient or 0.0
        return self.micro_batches * max(links.values(), default=0.0)

    @cached_property
    def program(self) -> Program:
        """The table, with what is recomputed and sent."""
        bare = self.table
        if bare is None:
            count = self.micro_batches * self.slices
            found = self.as_schedule()
            assert not isinstance(found, Program)
            rows = table_in_training(schedule_of(found), self.rank_of, count, self.slices)
            bare = Program.of(rows, count, rank_of=self.rank_of, slices=self.slices)
        return place_transfers(place_remat(join_backwards(bare, self.unsplit or ()), self.remat))

    @cached_property
    def simulation(self) -> Simulation:
        """The timeline and the peak bytes, by the simulator."""
        return simulate(self.program, self.costs)

    def explain(self) -> str:
        """Says what is to be done, what it will take, what comes next, and why the others were rejected."""
        return "\n".join([*self._chosen(), *self._ranks(), *self._others()])

    def _repr_html_(self) -> str | None:
        return notebook_html("plan", self)

    def _chosen(self) -> Iterator[str]:
        is_timed = self.costs_by in ("time", "operations")
        rows = f" for {self.global_batch} rows, {self.rows_per_second:,.6g} rows/s" if self.global_batch else ""
        yield f"{self.shape}: {format_seconds(self.seconds, 'ms' if is_timed else '')}{rows}"
        longest = max(cost.forward + cost.backward for cost in self.costs)
        if self.partitions > 1 and is_timed and longest < NOISE_SECONDS:
            yield (
                f"no stage takes more than {longest * 1e6:.3g} us a micro-batch, and handing it on takes as long: "
                "differences between plans are noise here; train without a pipeline, or give larger micro-batches"
            )
        carried = f"messages for {format_seconds(self.communication)}" if self.communication else "none"
        link = f"; the busiest link carries {carried}" if len(self.devices) > 1 else ""
        yield f"bubble {self.bubble:.1%}{link}"
        yield from self._over()
        if self.plain_seconds is not None:
            slower = self.plain_seconds > self.seconds
            which = "the plan is faster" if slower else "it is faster here; a pipeline pays where ranks have devices"
            yield f"plain torch with all these cores takes {format_seconds(self.plain_seconds)}, measured: {which}"

    def _over(self) -> Iterator[str]:
        if self.least_seconds:
            unit = "ms" if self.measured else ""
            least, over = format_seconds(self.least_seconds, unit), max(0.0, self.seconds / self.least_seconds - 1)
            yield f"{over:.1%} over {least}, which no table of these stages goes below"

    def compared(self) -> Iterator[str]:
        """Says how what was searched for stands beside the least that there can be, and beside pages."""
        pages = (other for other in self.alternatives if other.table is None)
        told = [f"{other.shape} would take {max(0.0, other.seconds / self.seconds - 1):.1%} more" for other in pages]
        yield "; ".join(["schedule searched for: " + "".join(self._over()), *told])

    def _ranks(self) -> Iterator[str]:
        words: list[list[str]] = [[] for _ in range(self.partitions)]
        for rank, (first, end), remat in zip(
            self.rank_of, bounds(self.layers_per_partition), self.remat, strict=True
        ):
            last = "" if end - first == 1 else f" to {self.names[end - 1]} ({end - first})"
            words[rank].append(f"{self.names[first]}{last}, remat {remat}")
        devices = self.devices or (Device(),) * self.partitions
        for rank, (device, peak) in enumerate(zip_longest(devices, self.peak_bytes)):
            name = f" ({device.name})" if device.name else ""
            of = "" if device.memory == inf else f" of {format_bytes(device.memory)}"
            held = "" if peak is None else f"; {format_bytes(peak)}{of}"
            yield f"rank {rank}{name}: {'; '.join(words[rank])}{held}"

    def _others(self) -> Iterator[str]:
        for other in self.alternatives:
            part = other.seconds / self.seconds - 1
            less = part <= -LEAST_SHARE_TOLD
            longer = f"{-part:.1%} less, with more stages" if less else f"{max(part, 0):.1%} longer"
            yield f"next: {other.shape}: {format_seconds(other.seconds)}, {longer}"
        for reason, count in Counter(each.reason for each in self.rejected).items():
            first = next(each for each in self.rejected if each.reason == reason)
            yield f"rejected, {reason}: {count}, first {first}"


def _read_device(stored: Sequence[Any]) -> Device:
    memory, flops, link, name, host = stored
    return Device(inf if memory is None else memory, flops, inf if link is None else link, name, host)


_STORED = {each.name for each in fields(Plan)} - {"table", "unsplit", "costs", "devices", "alternatives", "rejected"}
