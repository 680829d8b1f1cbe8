"""What a search found: the plan, the next best, and why the others were rejected."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Literal

from gpipe.planner.search.device import Device, bytes_text, lasts
from gpipe.planner.search.profile import bounds
from gpipe.planner.search.shapes import Shape
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat, place_remat, place_transfers
from gpipe.schedule.program import Program, in_cell
from gpipe.schedule.schedules import Placement
from gpipe.schedule.simulate import Simulation, simulate

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


@dataclass(frozen=True)
class Plan:
    """How a network is to be trained, and what is predicted of that; `gpipe.GPipe(model, plan=plan)` does it.

    Attributes:
        partitions: K, how many ranks there are.
        micro_batches: M.
        layers_per_partition: The layers of each stage.
        schedule: By name.
        stages_per_rank: How many stages each rank holds.
        remat: Of each stage: `"never"`, `"always"`, or how many micro-batches at once keep what is inside.
        seconds: Of a mini-batch, but for its data and the optimizer.
        peak_bytes: The most that each rank holds: state of its layers, and activations.
        bubble: The share of rank-seconds in which nothing is computed, the imbalance of the stages included.
        global_batch: The rows of a mini-batch.
        devices: Of the ranks.
        costs: Of the stages.
        names: Of the layers.
        work: Of the layers, seconds of forward and backward of a micro-batch on the first device.
        measured: Whether seconds were measured; else they follow from the devices' FLOP/s.
        table: Of what each rank does, where it was searched for: then `schedule` is `"auto"`.
        least_seconds: That no table of these stages goes below, where one was searched for.
        plain_seconds: Of the same mini-batch in plain torch with all these cores, where that was measured.
        alternatives: The next best, of other shapes.
        rejected: Why all others were not taken.

    >>> from gpipe.planner.search.profile import LayerProfile, Line, Profile
    >>> from gpipe.planner.search.search import search
    >>> from gpipe.planner.search.shapes import Choices
    >>> layer = LayerProfile("layer", forward=Line(per_row=1e9), backward=Line(per_row=2e9))
    >>> devices = [Device(flops=1e9)] * 2
    >>> plan = search(Profile((layer,) * 4), devices, global_batch=4, choices=Choices(schedules=["1f1b"]))
    >>> print(plan.explain().splitlines()[0])
    K=2 M=4 1f1b: 30.0 s for 4 rows, 0.133333 rows/s
    """

    partitions: int
    micro_batches: int
    layers_per_partition: tuple[int, ...]
    schedule: str
    stages_per_rank: int
    remat: tuple[Remat, ...]
    seconds: float
    peak_bytes: tuple[int, ...]
    bubble: float
    global_batch: int
    devices: tuple[Device, ...] = field(repr=False)
    costs: tuple[StageCost, ...] = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    work: tuple[float, ...] = field(repr=False)
    measured: bool = False
    table: Program | None = field(default=None, repr=False)
    least_seconds: float | None = None
    plain_seconds: float | None = None
    alternatives: tuple["Plan", ...] = field(default=(), repr=False)
    rejected: tuple[Rejection, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> Shape:
        """All but the cuts and the remat."""
        return Shape(self.partitions, self.micro_batches, self.schedule, self.stages_per_rank)

    @property
    def rank_of(self) -> Placement:
        """The rank of each stage."""
        found = self.table.rank_of if self.table else self.shape.rank_of
        assert found is not None  # it was timed
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
        bare = self.table or self.shape.program()
        assert bare is not None  # it was timed
        return place_transfers(place_remat(bare, self.remat))

    @cached_property
    def simulation(self) -> Simulation:
        """The timeline and the peak bytes, by the simulator."""
        return simulate(self.program, self.costs)

    def explain(self) -> str:
        """Says what is to be done, what it will take, what comes next, and why the others were rejected."""
        return "\n".join([*self._chosen(), *self._ranks(), *self._others()])

    def _repr_html_(self) -> str | None:
        return in_cell("plan", self)

    def _chosen(self) -> Iterator[str]:
        yield f"{self.shape}: {lasts(self.seconds)} for {self.global_batch} rows, {self.rows_per_second:,.6g} rows/s"
        longest = max(cost.forward + cost.backward for cost in self.costs)
        if self.partitions > 1 and longest < NOISE_SECONDS:
            yield (
                f"no stage takes more than {longest * 1e6:.3g} us a micro-batch, and handing it on takes as long: "
                "differences between plans are noise here; train without a pipeline, or give larger micro-batches"
            )
        carried = f"messages for {lasts(self.communication)}" if self.communication else "none"
        link = f"; the busiest link carries {carried}" if len(self.devices) > 1 else ""
        yield f"bubble {self.bubble:.1%}{link}"
        yield from self._over()
        if self.plain_seconds is not None:
            slower = self.plain_seconds > self.seconds
            which = "the plan is faster" if slower else "it is faster here; a pipeline pays where ranks have devices"
            yield f"plain torch with all these cores takes {lasts(self.plain_seconds)}, measured: {which}"

    def _over(self) -> Iterator[str]:
        if self.least_seconds:
            unit = "ms" if self.measured else ""
            least, over = lasts(self.least_seconds, unit), max(0.0, self.seconds / self.least_seconds - 1)
            yield f"{over:.1%} over {least}, which no table of these stages goes below"

    def compared(self) -> Iterator[str]:
        """Says how what was searched for stands beside the least that there can be, and beside pages."""
        pages = (other for other in self.alternatives if other.table is None)
        told = [f"{other.shape} would take {max(0.0, other.seconds / self.seconds - 1):.1%} more" for other in pages]
        yield "; ".join(["schedule searched for: " + "".join(self._over()), *told])

    def _ranks(self) -> Iterator[str]:
        words: list[list[str]] = [[] for _ in self.devices]
        for rank, (first, end), remat in zip(
            self.rank_of, bounds(self.layers_per_partition), self.remat, strict=True
        ):
            last = "" if end - first == 1 else f" to {self.names[end - 1]} ({end - first})"
            words[rank].append(f"{self.names[first]}{last}, remat {remat}")
        for rank, (device, peak) in enumerate(zip(self.devices, self.peak_bytes, strict=True)):
            name = f" ({device.name})" if device.name else ""
            of = "" if device.memory == inf else f" of {bytes_text(device.memory)}"
            yield f"rank {rank}{name}: {'; '.join(words[rank])}; {bytes_text(peak)}{of}"

    def _others(self) -> Iterator[str]:
        for other in self.alternatives:
            part = other.seconds / self.seconds - 1
            less = part <= -LEAST_SHARE_TOLD
            longer = f"{-part:.1%} less, with more stages" if less else f"{max(part, 0):.1%} longer"
            yield f"next: {other.shape}: {lasts(other.seconds)}, {longer}"
        for reason, count in Counter(each.reason for each in self.rejected).items():
            first = next(each for each in self.rejected if each.reason == reason)
            yield f"rejected, {reason}: {count}, first {first}"
