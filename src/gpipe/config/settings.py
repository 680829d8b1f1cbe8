"""What a pipe is made of beside its plan: the layers, and where and how they run."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from gpipe.config.options import BatchNorm, Driver
from gpipe.planner.search.plan import Plan
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Schedule
from gpipe.schedule.schedules.by_name import schedule_of, schedule_of_program
from gpipe.stages.shared_weights import Tied
from gpipe.tracing.model import TracedModel


@dataclass(frozen=True)
class Settings:
    """The arguments of `GPipe` that no plan has, read and without mistakes."""

    layers: dict[str, nn.Module]
    traced: TracedModel | None  # if the layers are parts of a model
    tied: Tied  # over processes alone, where identity cannot show it
    schedule: Schedule
    devices: tuple[torch.device, ...]
    driver: Driver
    batch_norm: BatchNorm
    seed: int

    def following(self, plan: Plan) -> "Settings":
        """The settings with the schedule of a plan."""
        found = plan.as_schedule()
        return replace(
            self, schedule=(schedule_of_program(found) if isinstance(found, Program) else schedule_of(found)).once()
        )
