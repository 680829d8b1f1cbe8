"""How far a training is: all that it needs to go on, beside what a checkpoint holds anyway."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gpipe.recipes.options.training import TrainOptions, flag


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
    """The progress, decisive options, and what tells the data from others, for a checkpoint to keep."""
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
