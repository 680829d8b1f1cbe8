"""A shape that is tried with one cut after another: what its stages cost, and how long a mini-batch takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from gpipe.plan.action import Kind
from gpipe.plan.cost import StageCost
from gpipe.plan.program import Program
from gpipe.plan.search.device import Device
from gpipe.plan.search.fitting import Fitting, Levels
from gpipe.plan.search.profile import SizedProfile, bounds
from gpipe.plan.search.rehearsal import Rehearsal
from gpipe.plan.search.shapes import Shape


@dataclass(frozen=True)
class Settled:
    """Cuts that fit, with what is recomputed."""

    layers: tuple[int, ...]
    costs: tuple[StageCost, ...]
    levels: Levels
    seconds: float


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
    def stage_speeds(self) -> tuple[float, ...]:
        """Of the devices of its stages."""
        return tuple(self.speeds[rank] for rank in self.program.rank_of)

    @cached_property
    def splits(self) -> bool:
        """Whether some backwards are split in two."""
        return any(action.kind is Kind.BACKWARD_INPUT for action in self.program.actions)

    @cached_property
    def fitting(self) -> Fitting:
        """The table on the devices, for what has to be recomputed."""
        return Fitting(self.rehearsal, [device.memory for device in self.devices])

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
        begins = {rank: stages[0] for rank, stages in enumerate(self.rehearsal.stages_of)}
        m = self.shape.micro_batches
        for stage, cost in enumerate(costs):
            rank = self.program.rank_of[stage]
            if begins[rank] == stage:
                work = m * sum(costs[own].forward + costs[own].backward for own in self.rehearsal.stages_of[rank])
                found = max(found, ahead + work + (0.0 if self.splits else back))
            ahead += cost.forward + cost.send
            back += cost.backward + (costs[stage + 1].send_gradient or 0.0 if stage + 1 < len(costs) else 0.0)
        return max(found, ahead)

    def settle(self, layers: tuple[int, ...], costs: tuple[StageCost, ...]) -> Settled:
        """Finds what each stage of cuts that fit has to recompute for memory, and times the mini-batch."""
        return Settled(layers, costs, *self.fitting.fastest(costs))
