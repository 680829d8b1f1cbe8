"""A training that is interrupted: it saves after each step, is killed where it was told to be, and goes on.

    torchrun --nproc-per-node 2 --max-restarts 3 -m tests.soak.interrupted FOLDER 2+4+2 MOMENTS

It is what a user writes: the latest checkpoint is loaded if there is one, and the steps go on from there. Dropout,
BatchNorm, weights shared by the first and the last stage, AdamW and a learning rate that changes are in it. Each rank
writes down what it has after every step, for `resume` to compare.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

import gpipe
from gpipe.recipes.data import batches
from gpipe.recipes.world import find_world, joined
from tests.support.checkpointed import adamw, remembered
from tests.support.killed import kill_at
from tests.support.processes.faults import LAYER_PHASES, Fault, Faulty, strike

Json: TypeAlias = Any

STEPS = 30
LAYERS, FEATURES, MICRO_BATCHES = 8, 6, 4
ROWS, BATCH_SIZE = 76, 24
SEED = 3
PATIENCE_SECONDS = 6.0
"""How long the first rank waits for what another, which may be gone, has to write of a checkpoint."""
LATEST_SECONDS = 0.4
"""How long after its first step a rank lives at most that dies at any moment."""


@dataclass(frozen=True)
class Moment:
    """When a rank is killed, in the life that it begins when its process starts.

    Attributes:
        phase: A phase of a layer, or `"optimizer"`, `"between"` steps, `"save"`, or `"any"`; all but the last are of
            the second step of that life.
        rank: Who.
        number: The micro-batch; or the operation on files in whose midst it dies; or what chance is drawn from.
    """

    phase: str
    rank: int
    number: int = 1

    def __str__(self) -> str:
        match self.phase:
            case "save":
                return f"in a save, at operation {self.number} on files, rank {self.rank}"
            case "any":
                return f"at any moment ({self.number}), rank {self.rank}"
        where = "between steps" if self.phase == "between" else f"in {self.phase}"
        return f"{where}, rank {self.rank}"


@dataclass(frozen=True)
class Layout:
    """How the layers are trained: in so many processes, cut in stages of so many layers; one process has threads."""

    processes: int
    sizes: Sequence[int]

    @property
    def replicas(self) -> int:
        """How many processes hold the same stage."""
        return max(1, self.processes // len(self.sizes))

    def __str__(self) -> str:
        where = "in one process" if self.processes == 1 else f"in {self.processes} processes"
        return f"K={len(self.sizes)} {where}" + (f", {self.replicas} replicas" if self.replicas > 1 else "")


def build(layout: Layout, rank: int, moment: Moment | None) -> list[nn.Module]:
    """The layers, always of the same weights, and the moment that is one of a layer of this rank."""
    due = Fault("", "")
    if moment is not None and moment.phase in LAYER_PHASES and moment.rank == rank:
        last = sum(layout.sizes[: rank % len(layout.sizes) + 1]) - 1  # of its stage
        due = Fault("SIGKILL", moment.phase, last, micro_batch=moment.number)
    layers: list[nn.Module] = []
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        for _ in range(LAYERS // 2):
            inner = (nn.Linear(FEATURES, FEATURES), nn.Dropout(0.3), nn.Tanh(), nn.BatchNorm1d(FEATURES))
            sound_or_not = due if due.layer == len(layers) + 1 else None
            layers += [nn.Sequential(*inner), Faulty(FEATURES, MICRO_BATCHES // layout.replicas, sound_or_not)]
    layers[-1].weight = layers[1].weight
    return layers


class Training:
    """All that changes from step to step."""

    def __init__(self, layout: Layout, rank: int, moment: Moment | None) -> None:
        self.layout, self.rank = layout, rank
        self.pipe = gpipe.GPipe(
            build(layout, rank, moment),
            layout.sizes,
            MICRO_BATCHES // layout.replicas,
            seed=SEED,
            deferred_batch_norm=True,
            driver="threads" if layout.processes == 1 else "process",
        )
        self.optimizer = adamw(self.pipe.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def load(self, folder: Path) -> None:
        """Goes on from the latest checkpoint, if there is one."""
        if gpipe.find_checkpoint(folder, self.pipe) is not None:
            extra = gpipe.load(folder, self.pipe, self.optimizer).extra
            self.scheduler.load_state_dict(extra)

    def save(self, folder: Path) -> None:
        """Every second time in the background."""
        gpipe.save(
            folder,
            self.pipe,
            self.optimizer,
            extra=self.scheduler.state_dict(),
            background=self.pipe.step_number % 2 == 1,
            keep=3,
            limit=PATIENCE_SECONDS,
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """What this rank's replica has of the mini-batch that is next."""
        generator = torch.Generator().manual_seed(SEED)
        inputs, targets = torch.randn(2, ROWS, FEATURES, generator=generator)
        epoch, place = divmod(self.pipe.step_number, ROWS // BATCH_SIZE)
        rows = batches(ROWS, BATCH_SIZE, seed=SEED, epoch=epoch)[place]
        own = rows.tensor_split(self.layout.replicas)[self.rank // len(self.layout.sizes)]
        return inputs[own], targets[own]

    def now(self) -> Json:
        """All that this rank has, as numbers by name."""
        kept = remembered(self.pipe, self.optimizer) | {"scheduler": self.scheduler.state_dict()}
        return {name: [_number(leaf) for leaf in pytree.tree_leaves(value)] for name, value in kept.items()}


def _number(leaf: Any) -> Json:
    if isinstance(leaf, Tensor):
        return leaf.tolist()
    return leaf if isinstance(leaf, (int, float)) else 0.0  # what is no number tells how to compute, and is given


def train(rank: int, world: int, folder: str, sizes: Sequence[int], told: dict[str, Any] | None, life: int) -> None:
    """Trains until it is killed, or all steps are done.

    Args:
        rank: This process.
        world: How many there are.
        folder: Gets the checkpoints, and `rank_<number>.jsonl`: a line with all that a rank has after it was built or
            loaded, and after each step.
        sizes: The layers of each stage.
        told: The fields of the moment at which a rank is killed, if any is.
        life: How often the training was begun before.
    """
    moment = None if told is None else Moment(**told)
    training = Training(Layout(world, sizes), rank, moment)
    checkpoints, log = Path(folder, "checkpoints"), Path(folder, f"rank_{rank}.jsonl")
    training.load(checkpoints)
    _note(log, life, training, None)
    due = moment if moment is not None and moment.rank == rank else None
    for step in range(STEPS - training.pipe.step_number):
        _strike(due, "between", step)
        loss = training.pipe.step(*training.batch(), mse_loss)
        _strike(due, "optimizer", step)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.scheduler.step()
        _note(log, life, training, loss.item())
        _strike(due, "save", step)
        training.save(checkpoints)
        _strike(due, "any", step)
    training.pipe.close()


def _note(log: Path, life: int, training: Training, loss: float | None) -> None:
    line = {"life": life, "step": training.pipe.step_number, "loss": loss, "state": training.now()}
    with log.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def _strike(due: Moment | None, phase: str, step: int) -> None:
    """Has this process killed, if this is the moment; or soon."""
    if due is None or due.phase != phase:
        return
    if phase == "any" and step == 0:  # SIGALRM ends a process wherever it is, and nothing is told before
        signal.setitimer(signal.ITIMER_REAL, random.Random(due.number).uniform(1e-3, LATEST_SECONDS))
    elif phase == "save" and step == 1:
        kill_at(due.number)
    elif phase in ("between", "optimizer") and step == 1:
        strike("SIGKILL")


def main(folder: str, sizes: str, moments: str) -> None:
    """One process under torchrun, which tells how often it has started all of them again."""
    torch.set_num_threads(1)
    world = find_world(os.environ)
    told = dict(enumerate(json.loads(moments))).get(world.restarts)
    with joined(world):
        train(world.rank, world.size, folder, [int(size) for size in sizes.split("+")], told, world.restarts)


def arguments(folder: Path, layout: Layout, moments: Sequence[Moment]) -> list[str]:
    """What `main` is given, for lives that end so, and one that does not."""
    return [str(folder), "+".join(map(str, layout.sizes)), json.dumps([asdict(moment) for moment in moments])]


if __name__ == "__main__":
    main(*sys.argv[1:])
