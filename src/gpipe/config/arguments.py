"""What the user gave to `GPipe`, some of it perhaps by a plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import nn

from gpipe.planner.search.found import Plan
from gpipe.schedule.partition import Balance
from gpipe.schedule.program import Program
from gpipe.schedule.schedules.by_name import Maker
from gpipe.stages.sequence import Layers
from gpipe.stages.tree import Tree
from gpipe.tracing.layers_of import ModelLayers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Driver: TypeAlias = Literal["threads", "lockstep", "process"]
Costs: TypeAlias = Sequence[float] | Literal["params", "time", "flops"] | Callable[[nn.Module, Tree], float] | None
UNSAID: dict[str, Any] = {"partitions": None, "schedule": "gpipe", "stages_per_rank": None, "remat": "always"}
"""The arguments that a plan alone gives, as they are where the user says nothing."""


@dataclass(frozen=True, eq=False)
class Arguments:
    """What the user gave to `GPipe`, as it was given; see there."""

    model: Layers | nn.Module | ModelLayers
    partitions: int | Sequence[int]  # None if `plan` says it, until it does
    micro_batches: int  # likewise
    costs: Costs
    sample: Tree
    blocks: Sequence[str] | None
    balance: Balance
    devices: object
    schedule: str | Program | Maker
    stages_per_rank: int | None
    remat: object
    deferred_batch_norm: bool
    sync_batch_norm: bool
    ties: Sequence[Sequence[str]]
    seed: int | None
    intra_op_threads: int
    driver: str | None
    mesh: "DeviceMesh | None"
    survive: bool = False
    plan: Plan | None = None
    memory: object = None

    @property
    def in_seconds(self) -> bool:
        """Whether costs are to be measured as time."""
        return self.costs == "time" or (self.costs is None and self.sample is not None)

    def follow_plan(self) -> "Arguments":
        """The arguments with what the plan says of them, if there is one.

        What the plan has measured is taken for the costs of the layers, where the user gives none; what it has
        counted, if there is no sample on which to measure them. M may be given beside a plan, and is taken instead:
        a loss curve depends on it, and on nothing else in a plan.
        """
        plan = self.plan
        if plan is None:
            return self
        if not isinstance(plan, Plan):
            raise TypeError(f"plan= is a {type(plan).__name__}; give what gpipe.find_plan gave")
        said = [name for name, unsaid in UNSAID.items() if getattr(self, name) != unsaid]
        if said:
            raise ValueError(f"plan= says {', '.join(f'{name}=' for name in said)} already; leave them out, or plan=")
        own = self.micro_batches in (None, plan.micro_batches)
        takes_costs = self.costs is None and own and (plan.measured or self.sample is None)
        return replace(
            self,
            partitions=list(plan.layers_per_partition),
            micro_batches=plan.micro_batches if own else self.micro_batches,
            schedule=plan.table or plan.schedule,
            stages_per_rank=None if plan.table else plan.stages_per_rank,
            remat=list(plan.remat),
            costs=plan.work if takes_costs else self.costs,
        )


ARGUMENTS = [field.name for field in fields(Arguments)]
