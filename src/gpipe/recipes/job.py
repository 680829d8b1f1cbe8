"""A training that is ready: its recipe, its pipe, and how far it is.

How far a training is: all that it needs to go on, beside what a checkpoint holds anyway.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

import gpipe
from gpipe.recipes.learning import Averages
from gpipe.recipes.options.training import TrainOptions, flag
from gpipe.recipes.recipe import Recipe, Share
from gpipe.recipes.world import World


@dataclass(frozen=True)
class Epoch:
    """What an epoch came to, a line of metrics.jsonl.

    Attributes:
        epoch: Its number, from 1.
        loss: The mean over its steps.
        measured: How well the network does on held-out data, by name.
        seconds: How long it took, measuring included.
    """

    epoch: int
    loss: float
    measured: Mapping[str, float]
    seconds: float

    def line(self) -> dict[str, float]:
        """The line of metrics.jsonl.

        >>> Epoch(1, 0.5, {"accuracy": 0.25}, 2.0).line()
        {'epoch': 1, 'loss': 0.5, 'accuracy': 0.25, 'seconds': 2.0}
        """
        return {"epoch": self.epoch, "loss": self.loss, **self.measured, "seconds": self.seconds}


@dataclass
class Progress:
    """The epochs that are over, and of the one that has begun the losses of its steps and its seconds."""

    epochs: list[Epoch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"epoch {len(self.epochs)}" + (f", step {len(self.losses)} of the next" if self.losses else "")


def to_extra(progress: Progress, options: TrainOptions, data: str = "") -> dict[str, Any]:
    """The progress, decisive options, and what identifies the data, for a checkpoint to keep."""
    return {**asdict(progress), "options": decisive(options), "data": data}


def decisive(options: TrainOptions) -> dict[str, Any]:
    """The options that decide the numbers, as a checkpoint can keep them."""
    values = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in options.UNDECISIVE}
    return {name: value if isinstance(value, int | float | None) else str(value) for name, value in values.items()}


def from_extra(extra: Mapping[str, Any], options: TrainOptions, data: str = "") -> Progress:
    """Reads the progress that a checkpoint kept.

    Raises:
        ValueError: It is of another training: one line for each option that differs, and for the data.

    >>> from_extra(to_extra(Progress(losses=[0.5]), TrainOptions()), TrainOptions(seed=1))
    Traceback (most recent call last):
    ValueError: --seed is 1, and the checkpoint is of a training with 0: give that, or start anew without --resume
    """
    before, now = extra["options"], decisive(options)
    problems = [
        f"{flag(name)} is {value}, and the checkpoint is of a training with {before.get(name)}: give that, or start "
        f"anew without --resume"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if extra["data"] != data:
        problems.append("the training data are not those of the checkpoint: bring them back, or start anew")
    if problems:
        raise ValueError("\n".join(problems))
    return Progress([Epoch(**epoch) for epoch in extra["epochs"]], list(extra["losses"]), extra["seconds"])


CHECKPOINTS = "checkpoints"
KEPT = 2  # of them
PATIENCE = 20.0  # seconds without news from another rank that saves; torchrun kills after 30


@contextmanager
def locked(folder: Path, world: World) -> Iterator[None]:
    """Keeps the folder of a run for one training, by its rank 0; the lock ends with the process, too.

    Raises:
        ValueError: Another training writes into it.
    """
    if world.rank:
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"--out is {folder}, into which another training writes: wait for its end, or choose another folder"
        ) from None
    except OSError:
        pass  # a file system without locks


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
        """The options of the command."""
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
