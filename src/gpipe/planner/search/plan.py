"""Defines the result of a search: the plan, the best alternatives, and the reasons against all other plans."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise, zip_longest
from math import inf, isfinite
from typing import Any, Literal

from gpipe.planner.other_processes import SOME_CORES
from gpipe.planner.search.candidates import Shape
from gpipe.planner.search.device import Device
from gpipe.planner.search.profile import bounds
from gpipe.planner.search.units import format_bytes, format_seconds
from gpipe.schedule.action import Kind
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat, join_backwards, place_loads, place_remat, place_transfers
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program, notebook_html
from gpipe.schedule.schedules import SCHEDULES, Placement, table_in_training
from gpipe.schedule.schedules.by_name import (
    BreadthFirst,
    Interleaved,
    Named,
    Sliced,
    schedule_of,
    schedule_of_program,
)
from gpipe.schedule.simulate import Simulation, simulate

CostsBy = Literal["time", "operations", "params", "flops", "function", "numbers"]
Reason = Literal["slower", "too big", "more stages than layers", "no table of this size"]

NOISE_SECONDS = 1e-4  # the approximate overhead per micro-batch and stage; smaller costs are not meaningful
LEAST_SHARE_SHOWN = 5e-4  # smaller shares of the plan's seconds print as 0.0 %
TOLERATED_WAIT = 0.05  # with a larger share of time for which ranks wait for copies, transfers are the bottleneck
MAX_STORED = 1000  # the number of rejected shapes in the JSON of a plan


@dataclass(frozen=True)
class Rejection:
    """A shape that was not chosen, and the reason.

    >>> print(Rejection(Shape(2, 4, "1f1b"), "slower", "takes at least 2 s"))
    K=2 M=4 1f1b: takes at least 2 s
    """

    shape: Shape
    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.shape}: {self.detail or self.reason}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings to train a model, as plain data. Train with `gpipe.GPipe(model, plan=plan)`.

    `gpipe.find_plan` returns a plan, `pipe.plan` is the plan of a pipe, and checkpoints contain it.

    Attributes:
        micro_batches: M, the number of micro-batches.
        layers_per_partition: The number of layers in each stage.
        rank_of: The rank of each stage.
        schedule: The name of the schedule, or `"auto"` if the search found a new schedule.
        remat: The recomputation mode of each stage: `"never"`, `"always"`, `"except_last"`, `"offload"`,
            `"offload_inputs"`, or the number of micro-batches that keep their activations at the same time.
        names: The names of the layers.
        work: The cost of the forward and backward of one micro-batch, for each layer.
        costs: The cost of each stage.
        costs_by: The origin of the costs:

            - `"time"`: measured seconds.
            - `"operations"`: counted operations, divided by the speed of the devices.
            - `"params"`, `"flops"`, `"function"` or `"numbers"`: the `costs` argument, whose unit is arbitrary.
        counted: Whether the bytes of the stages were counted.
        slices: The number of slices of each micro-batch in a step.
        table: The program, if the search found a new schedule, or if the schedule was passed as a `Program` or
            function. Otherwise None.
        resident: The number of stages of a rank whose weights are on its device at the same time, if the weights are
            on the host. None if all weights are on the devices.
        unsplit: The stages whose backwards are not split. None before a pipe has chosen these stages.
        seconds: The predicted seconds of a mini-batch, without data loading and optimizer, in the unit of `costs`.
        peak_bytes: The predicted peak memory of each rank: weights, gradients, optimizer state, and activations.
        bubble: The predicted idle share of all ranks. This share includes the imbalance of the stages.
        global_batch: The rows of a mini-batch. 0 if unknown.
        devices: The devices of the ranks, if the plan was made for specific devices.
        least_seconds: A lower bound on the seconds of all schedules for these stages, if the search looked for a new
            schedule.
        plain_seconds: The measured seconds of the same mini-batch without gpipe, on all cores or on one core,
            whichever is faster. None if they were not measured.
        other_cores: The mean number of cores that other processes used while the layers were measured. None if it is
            unknown.
        alternatives: The next best plans, with other shapes.
        rejected: All other shapes, with the reasons why they were not chosen.

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
    resident: int | None = None
    unsplit: frozenset[int] | None = None
    seconds: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    bubble: float = 0.0
    global_batch: int = 0
    devices: tuple[Device, ...] = field(default=(), repr=False)
    least_seconds: float | None = None
    plain_seconds: float | None = None
    other_cores: float | None = field(default=None, repr=False, compare=False)
    alternatives: tuple["Plan", ...] = field(default=(), repr=False)
    rejected: tuple[Rejection, ...] = field(default=(), repr=False)

    @property
    def partitions(self) -> int:
        """K, the number of ranks."""
        return max(self.rank_of) + 1

    @property
    def stages_per_rank(self) -> int:
        """The number of stages on each rank."""
        return len(self.rank_of) // self.partitions

    @property
    def measured(self) -> bool:
        """Whether the costs are measured seconds."""
        return self.costs_by == "time"

    @property
    def recomputes(self) -> bool:
        """Whether a stage may recompute activations."""
        return any(remat not in ("never", "offload") for remat in self.remat)

    @property
    def shape(self) -> Shape:
        """The ranks, micro-batches and schedule of the plan, without its split points and recomputation."""
        return Shape(self.partitions, self.micro_batches, self.schedule, self.stages_per_rank, self.resident)

    @cached_property
    def partition(self) -> Partition:
        """The layers of each stage, with their costs."""
        return Partition.of_sizes(self.layers_per_partition, self.work)

    @cached_property
    def rank_seconds(self) -> tuple[float, ...]:
        """The total cost of the stages of each rank, in the same unit as `work`."""
        totals = [0.0] * self.partitions
        for rank, cost in zip(self.rank_of, self.partition.seconds, strict=True):
            totals[rank] += cost
        return tuple(totals)

    def as_schedule(self) -> Named | Program:
        """Returns the value for the argument `schedule` of `gpipe.GPipe`."""
        if self.table is not None:
            return self.table
        if self.resident is not None:
            return BreadthFirst(self.stages_per_rank, self.resident)
        is_default = SCHEDULES[self.schedule].stages_per_rank == self.stages_per_rank
        schedule = self.schedule if is_default else Interleaved(self.stages_per_rank, self.schedule)
        return schedule if self.slices == 1 else Sliced(schedule, self.slices)

    def of_micro_batches(self, micro_batches: int) -> "Plan":
        """Returns the same plan with a different M. Costs per micro-batch are scaled, and bytes become unknown."""
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
        """Returns the same plan with the simulated seconds, peak memory and bubble."""
        timeline, peaks = self.simulation.timeline, self.simulation.peak_bytes if self.counted else ()
        return replace(self, seconds=timeline.seconds, peak_bytes=peaks, bubble=timeline.idle_share())

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON, for `from_json`. Contains at most the first `MAX_STORED` rejected shapes."""
        stored = {name: value for name, value in vars(self).items() if name in _STORED and value is not None}
        stored |= {} if self.table is None else {"table": self.table.to_text().splitlines()}
        stored |= {} if self.unsplit is None else {"unsplit": sorted(self.unsplit)}
        stored["costs"] = [*map(astuple, self.costs)]
        stored["devices"] = [[None if n == inf else n for n in astuple(device)] for device in self.devices]
        stored["alternatives"] = [plan.to_json() for plan in self.alternatives]
        rejected = self.rejected[:MAX_STORED]
        stored["rejected"] = [[*astuple(each.shape), each.reason, each.detail] for each in rejected]
        return {name: _encode(value) for name, value in stored.items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Plan":
        """Returns the plan from the result of `to_json`.

        Args:
            stored: The result of `to_json`, also after `json.dumps` and `json.loads`.

        Returns:
            The plan. The plan has only the first `MAX_STORED` rejected shapes, because `to_json` omits the others.

        Raises:
            ValueError: If the data is not a plan.
        """
        try:
            values: dict[str, Any] = {name: _decode(stored[name]) for name in _STORED & stored.keys()}
            if "table" in stored:
                values["table"] = Program.from_text("\n".join(stored["table"]))
            if "unsplit" in stored:
                values["unsplit"] = frozenset(stored["unsplit"])
            plan = cls(
                **values,
                costs=tuple(StageCost(*numbers) for numbers in _decode(stored["costs"])),
                devices=tuple(_read_device(numbers) for numbers in stored["devices"]),
                alternatives=tuple(map(cls.from_json, stored.get("alternatives", ()))),
                rejected=tuple(Rejection(Shape(*row[:-2]), *row[-2:]) for row in stored.get("rejected", ())),
            )
            assert sum(plan.layers_per_partition) == len(plan.names) == len(plan.work)
            assert len(plan.layers_per_partition) == len(plan.rank_of) == len(plan.remat) == len(plan.costs)
        except (AssertionError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"stored is not a plan ({error}). Pass the result of Plan.to_json().") from None
        return plan

    @property
    def rows_per_second(self) -> float:
        """The predicted throughput."""
        return self.global_batch / self.seconds

    @property
    def communication(self) -> float:
        """The seconds per mini-batch during which the busiest link between two ranks is in use, in one direction."""
        links: defaultdict[tuple[int, int], float] = defaultdict(float)
        for stage, (before, after) in enumerate(pairwise(self.rank_of)):
            if before != after:
                links[before, after] += self.costs[stage].send
                links[after, before] += self.costs[stage + 1].send_gradient or 0.0
        return self.micro_batches * max(links.values(), default=0.0)

    @property
    def host_bytes(self) -> int:
        """The bytes in host memory: with weights on the host, weights, gradients, optimizer state and inputs."""
        inputs = zip(self.costs[1:], self.remat[1:], strict=True)
        offloaded = sum(cost.boundary for cost, remat in inputs if remat == "offload_inputs")
        return sum(cost.on_host for cost in self.costs) + self.micro_batches * offloaded

    @cached_property
    def program(self) -> Program:
        """The program of a mini-batch, with recomputation and messages."""
        bare = self.table
        if bare is None:
            count = self.micro_batches * self.slices
            schedule = self.as_schedule()
            assert not isinstance(schedule, Program)
            rows = table_in_training(schedule_of(schedule), self.rank_of, count, self.slices)
            bare = Program.of(rows, count, rank_of=self.rank_of, slices=self.slices)
        program = place_transfers(place_remat(join_backwards(bare, self.unsplit or ()), self.remat))
        return program if self.resident is None else place_loads(program, range(program.stages), self.resident)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated timeline and peak memory."""
        return simulate(self.program, self.costs)

    def explain(self) -> str:
        """Describes the plan, its predicted cost, the next best plans, and why other plans were rejected."""
        return "\n".join(
            [*self._explain_plan(), *self.explain_load(), *self._explain_ranks(), *self._explain_others()]
        )

    def _repr_html_(self) -> str | None:
        return notebook_html("plan", self)

    def _explain_plan(self) -> Iterator[str]:
        is_timed = self.costs_by in ("time", "operations")
        rows = f" for {self.global_batch} rows, {self.rows_per_second:,.6g} rows/s" if self.global_batch else ""
        yield f"{self.shape}: {format_seconds(self.seconds, 'ms' if is_timed else '')}{rows}"
        longest = max(cost.forward + cost.backward for cost in self.costs)
        if self.partitions > 1 and is_timed and longest < NOISE_SECONDS:
            yield (
                f"The slowest stage takes {longest * 1e6:.3g} us per micro-batch, which is less than the overhead. "
                "Train without a pipeline, or use larger micro-batches."
            )
        busy = f"busy for {format_seconds(self.communication)}" if self.communication else "unused"
        link = f"; the busiest link is {busy}" if len(self.devices) > 1 else ""
        yield f"bubble {self.bubble:.1%}{link}"
        yield from self._explain_bound()
        if self.plain_seconds is not None:
            comparison = (
                "slower" if self.plain_seconds > self.seconds else "faster (a pipeline needs several devices)"
            )
            plain = format_seconds(self.plain_seconds)
            yield f"training without gpipe takes {plain}, which is {comparison}"
        yield from self.explain_host()

    def _explain_bound(self) -> Iterator[str]:
        if self.least_seconds:
            unit = "ms" if self.measured else ""
            least, over = format_seconds(self.least_seconds, unit), max(0.0, self.seconds / self.least_seconds - 1)
            yield f"{over:.1%} above the lower bound {least} for these stages"

    def compared(self) -> Iterator[str]:
        """Yields a line that compares a new schedule with its lower bound and with named schedules."""
        others = [
            f"{other.shape} takes {max(0.0, other.seconds / self.seconds - 1):.1%} longer"
            for other in self.alternatives
            if other.table is None
        ]
        yield "; ".join(["searched schedule: " + "".join(self._explain_bound()), *others])

    def explain_load(self) -> Iterator[str]:
        """Yields a warning if other processes used cores while the layers were measured."""
        if self.measured and self.other_cores is not None and self.other_cores > SOME_CORES:
            yield (
                f"Other processes used {self.other_cores:.1f} cores while the layers were measured, so costs may be "
                "wrong. Measure again without them."
            )

    def explain_host(self) -> Iterator[str]:
        """Yields what weights on the host cost: host memory, and the time for which ranks wait for copies."""
        if self.resident is None:
            return
        held = f"; {format_bytes(self.host_bytes)} of host memory" if self.counted else ""
        stages = f"{self.stages_per_rank} stages per rank, {self.resident} loaded at the same time"
        yield f"weights on the host: {stages}{held}"
        if any(cost.load for cost in self.costs):
            unit = "ms" if self.costs_by in ("time", "operations") else ""
            ideal = [replace(cost, load=0.0, unload=0.0) for cost in self.costs]
            timeline, least = self.simulation.timeline, simulate(self.program, ideal).timeline.seconds
            loads = [[a.stage for a in row if a.kind is Kind.LOAD] for row in self.program.table]
            copies = format_seconds(max(sum(self.costs[stage].load for stage in row) for row in loads), unit)
            busiest = format_seconds(max(map(timeline.busy, range(self.partitions))), unit)
            share = timeline.seconds / least - 1 if least else 0.0
            bottleneck = "transfers" if share > TOLERATED_WAIT else "computation"
            yield (
                f"a rank computes for {busiest} and loads weights for {copies}; waiting for copies adds {share:.1%}, "
                f"so the bottleneck is {bottleneck}"
            )

    def _explain_ranks(self) -> Iterator[str]:
        stages: list[list[str]] = [[] for _ in range(self.partitions)]
        for rank, (first, end), remat in zip(
            self.rank_of, bounds(self.layers_per_partition), self.remat, strict=True
        ):
            last = "" if end - first == 1 else f" to {self.names[end - 1]} ({end - first})"
            stages[rank].append(f"{self.names[first]}{last}, remat {remat}")
        devices = self.devices or (Device(),) * self.partitions
        for rank, (device, peak) in enumerate(zip_longest(devices, self.peak_bytes)):
            name = f" ({device.name})" if device.name else ""
            of = "" if device.memory == inf else f" of {format_bytes(device.memory)}"
            held = "" if peak is None else f"; {format_bytes(peak)}{of}"
            yield f"rank {rank}{name}: {'; '.join(stages[rank])}{held}"

    def _explain_others(self) -> Iterator[str]:
        for other in self.alternatives:
            share = other.seconds / self.seconds - 1
            is_faster = share <= -LEAST_SHARE_SHOWN
            change = f"{-share:.1%} faster, with more stages" if is_faster else f"{max(share, 0):.1%} slower"
            yield f"next: {other.shape}: {format_seconds(other.seconds)}, {change}"
        for reason, count in Counter(each.reason for each in self.rejected).items():
            first = next(each for each in self.rejected if each.reason == reason)
            yield f"rejected ({reason}): {count}, such as {first}"


def _read_device(stored: Sequence[Any]) -> Device:
    values: Iterator[Any] = (inf if value is None else value for value in stored)
    memory, flops, link, *others = values
    return Device(memory, flops, link, *others)


def _encode(value: Any) -> Any:
    """Replaces infinities and NaNs in a value, because JSON has no such numbers."""
    if isinstance(value, float) and not isfinite(value):
        return {"float": str(value)}
    return [*map(_encode, value)] if isinstance(value, (list, tuple)) else value


def _decode(stored: Any) -> Any:
    if isinstance(stored, dict):
        return float(stored["float"])
    return tuple(map(_decode, stored)) if isinstance(stored, (list, tuple)) else stored


_STORED = {each.name for each in fields(Plan)} - {"table", "unsplit", "costs", "devices", "alternatives", "rejected"}
