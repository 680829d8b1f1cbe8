"""The arguments of `GPipe`, as passed by the user (`Arguments`) and as resolved (`Settings`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from gpipe.config.options import BatchNorm, Driver, Remat
from gpipe.planner.search.candidates import AUTO
from gpipe.planner.search.plan import Plan
from gpipe.schedule.partition import Balance
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Schedule
from gpipe.schedule.schedules.by_name import Maker, Named, schedule_of, schedule_of_program
from gpipe.stages.sequence import Layers
from gpipe.stages.shared_weights import Tied
from gpipe.stages.tree import Tree
from gpipe.tracing.layers_of import ModelLayers
from gpipe.tracing.model import TracedModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Costs: TypeAlias = Sequence[float] | Literal["params", "time", "flops"] | Callable[[nn.Module, Tree], float] | None
PLAN_DEFAULTS: dict[str, Any] = {"partitions": None, "schedule": "gpipe", "remat": "always", "weights": "device"}
"""The default values of the arguments that a plan determines."""


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of `GPipe` as the user passed them, with the arguments `costs` and `balance` of `find_plan`."""

    model: Layers | nn.Module | ModelLayers
    partitions: Any
    micro_batches: Any
    sample: Tree = None
    plan: Plan | None = None
    schedule: Named | Program | Maker = "gpipe"
    remat: object = "always"
    devices: object = None
    mesh: "DeviceMesh | None" = None
    batch_norm: BatchNorm = "micro"
    ties: Sequence[Sequence[str]] = ()
    seed: int | None = None
    driver: str | Driver | None = None
    weights: str = "device"
    costs: Costs = None
    balance: Balance = "variance"

    @property
    def measures_time(self) -> bool:
        """Whether gpipe measures the time of the layers on the sample."""
        return self.plan is None and (self.costs == "time" or (self.costs is None and self.sample is not None))

    @property
    def fits_remat(self) -> bool:
        """Whether gpipe chooses the recomputation so that the stages fit in memory."""
        return self.remat == AUTO or isinstance(self.remat, Remat)

    @property
    def memory(self) -> Any:
        """The number of bytes that each rank may hold, or None if the user did not set it."""
        return self.remat.memory if isinstance(self.remat, Remat) else None

    def follow_plan(self) -> "Arguments":
        """Returns the arguments with the values of the plan, if there is one.

        If the user passes both `micro_batches` and a plan, `micro_batches` replaces the number in the plan.
        """
        plan = self.plan
        if plan is None:
            return self
        if not isinstance(plan, Plan):
            raise TypeError(f"plan= is a {type(plan).__name__}. Pass a plan that gpipe.find_plan returned.")
        if passed := [f"{name}=" for name, default in PLAN_DEFAULTS.items() if getattr(self, name) != default]:
            raise ValueError(f"plan= already determines {', '.join(passed)}. Remove {', '.join(passed)} or plan=.")
        return replace(
            self,
            partitions=list(plan.layers_per_partition),
            micro_batches=plan.micro_batches if self.micro_batches is None else self.micro_batches,
            schedule=plan.as_schedule(),
            remat=list(plan.remat),
            weights="device" if plan.resident is None else "host",
        )


@dataclass(frozen=True)
class Settings:
    """The resolved arguments of `GPipe` that are not part of a plan."""

    layers: dict[str, nn.Module]
    traced: TracedModel | None  # None if the user passed a sequence of layers.
    tied: Tied  # Only with several processes, which cannot show a tie by sharing one parameter.
    schedule: Schedule
    devices: tuple[torch.device, ...]  # one per rank
    driver: Driver
    batch_norm: BatchNorm
    seed: int
    resident: int | None  # the stages of a rank whose weights are on its device at once; None if all are

    def with_schedule_of(self, plan: Plan) -> "Settings":
        """Returns a copy of these settings that uses the schedule of a plan."""
        schedule = plan.as_schedule()
        return replace(
            self,
            schedule=(
                schedule_of_program(schedule) if isinstance(schedule, Program) else schedule_of(schedule)
            ).once(),
        )


class Mistakes(list[str]):
    """A list of messages about invalid arguments, which one error reports together."""

    def check(self, condition: bool, message: str) -> bool:
        """Adds the message if the condition is false. Returns the condition."""
        if not condition:
            self.append(message)
        return condition

    def raise_all(self) -> None:
        """Raises a ValueError that lists the messages, if this list is not empty."""
        if self:
            lines = (f"- {message}" for message in dict.fromkeys(self))
            raise ValueError("\n".join(["GPipe cannot be built:", *lines]))
