"""A training that is ready: its recipe, its pipe, and how far it is."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

import gpipe
from gpipe.recipes.learning.averages import Averages
from gpipe.recipes.options.training import TrainOptions
from gpipe.recipes.progress import Progress, to_extra
from gpipe.recipes.recipe import Recipe, Share
from gpipe.recipes.world import World

CHECKPOINTS = "checkpoints"
KEPT = 2  # of them
PATIENCE = 20.0  # seconds without news from another rank that saves; torchrun kills after 30


@dataclass(frozen=True, eq=False)
class Job:
    """All that training needs, checked and built, and how far it is."""

    recipe: Recipe[Any]
    pipe: gpipe.GPipe
    optimizer: torch.optim.Optimizer
    averages: Averages
    progress: Progress
    world: World
    how: Mapping[str, Any]

    @property
    def options(self) -> TrainOptions:
        """What the command was told."""
        options: TrainOptions = self.recipe.options
        return options

    @property
    def name(self) -> str:
        """The network and how it is pipelined."""
        o, replicas = self.options, replicas_of(self.pipe.partitions, self.world)
        return (
            f"{self.recipe.title}, {self.pipe.partitions} partitions, "
            f"{f'{replicas} replicas, ' if replicas > 1 else ''}"
            f"{o.micro_batches} micro-batches, {self._how_in_words}"
        )

    @property
    def _how_in_words(self) -> str:
        if self.options.plan is not None:
            return "planned for this machine"
        return f"schedule {self.options.schedule}, remat {self.options.remat.replace('_', ' ')}"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.options.out / CHECKPOINTS

    @property
    def steps(self) -> int:
        """How many steps the training has."""
        return self.options.steps or self.options.epochs * self.recipe.steps_per_epoch

    @property
    def epochs(self) -> int:
        """How many epochs it has; the last one may be short."""
        return ceil(self.steps / self.recipe.steps_per_epoch)

    def steps_of(self, epoch: int) -> int:
        """How many steps an epoch has, counted from 1."""
        return min(self.recipe.steps_per_epoch, self.steps - (epoch - 1) * self.recipe.steps_per_epoch)

    @property
    def share(self) -> Share:
        """What this process reads of each mini-batch."""
        replicas = replicas_of(self.pipe.partitions, self.world)
        return Share(self.world.rank // self.pipe.partitions, replicas, self.pipe.reads_inputs)

    @property
    def precision(self) -> AbstractContextManager[Any]:
        """What forwards are computed in."""
        return precision(self.options, self.pipe.devices[0])

    def begin_save(self) -> Callable[[], Path]:
        """Begins to save a checkpoint; what it gives waits for it, and gives its folder.

        A last epoch that was short is saved as one that has begun: more steps may come.
        """
        whole = self.progress.epochs[: self.steps // self.recipe.steps_per_epoch]
        extra = to_extra(replace(self.progress, epochs=whole), self.options, self.recipe.data)
        return gpipe.save(
            self.checkpoints, self.pipe, self.optimizer, extra=extra, background=True, keep=KEPT, limit=PATIENCE
        ).wait


def precision(options: TrainOptions, device: torch.device) -> AbstractContextManager[Any]:
    """What forwards are computed in: float32, or under autocast."""
    return torch.autocast(device.type, torch.bfloat16) if options.bf16 else nullcontext()


def parts_of(plan: gpipe.Plan) -> dict[str, Any]:
    """What a plan says to `GPipe`, in plain values."""
    return {
        "partitions": list(plan.layers_per_partition),
        "schedule": plan.schedule,
        "stages_per_rank": plan.stages_per_rank,
        "remat": list(plan.remat),
    }


def replicas_of(partitions: int, world: World) -> int:
    """How many replicas the processes are."""
    return world.size // partitions if world.launched else 1
