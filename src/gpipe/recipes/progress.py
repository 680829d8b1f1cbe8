"""How far a training is: all that it needs to go on, beside what a checkpoint holds anyway."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gpipe.recipes.options import TrainOptions

DECISIVE = ("micro_batches", "layers", "filters", "epochs", "seed")
"""The options that decide the numbers."""


@dataclass(frozen=True)
class Epoch:
    """What an epoch came to, a line of metrics.jsonl; accuracy is a share of the held-out images."""

    epoch: int
    loss: float
    accuracy: float
    seconds: float


@dataclass
class Progress:
    """The epochs that are over, and of the one that has begun the losses of its steps and its seconds."""

    epochs: list[Epoch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"epoch {len(self.epochs)}" + (f", step {len(self.losses)} of the next" if self.losses else "")


def to_extra(progress: Progress, options: TrainOptions) -> dict[str, Any]:
    """The progress and decisive options, for a checkpoint to keep."""
    return {**asdict(progress), "options": {name: getattr(options, name) for name in DECISIVE}}


def from_extra(extra: Mapping[str, Any], options: TrainOptions) -> Progress:
    """Reads the progress that a checkpoint kept.

    Raises:
        ValueError: It is of another training: one line for each option that differs.

    >>> from_extra(to_extra(Progress(losses=[0.5]), TrainOptions()), TrainOptions(seed=1))
    Traceback (most recent call last):
    ValueError: --seed is 1, and the checkpoint is of a training with 0: give that, or start anew without --resume
    """
    before = extra["options"]
    problems = [
        f"--{name.replace('_', '-')} is {getattr(options, name)}, and the checkpoint is of a training with "
        f"{before[name]}: give that, or start anew without --resume"
        for name in DECISIVE
        if before[name] != getattr(options, name)
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return Progress([Epoch(**epoch) for epoch in extra["epochs"]], list(extra["losses"]), extra["seconds"])
