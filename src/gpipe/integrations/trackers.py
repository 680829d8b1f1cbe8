"""Where the time of a pipe's steps went, for whatever tracker a Trainer reports to."""

from typing import Any

from transformers import TrainerCallback

import gpipe


class GPipeCallback(TrainerCallback):
    """Has a Trainer log `recording.metrics()` of its pipe whenever it logs a loss: of the steps since the last time.

    The names begin with `gpipe/`. Recording costs two readings of a clock for each action.

    Args:
        trainer: One with a `pipe`, such as a `GPipeTrainer`.

    Raises:
        TypeError: When training begins, the trainer has no pipe.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], partitions=2, micro_batches=2)
    >>> trainer = SimpleNamespace(pipe=pipe, log=lambda numbers: print(numbers["gpipe/steps"]))
    >>> callback = GPipeCallback(trainer)  # of a real one: trainer.add_callback(GPipeCallback(trainer))
    >>> callback.on_train_begin()
    >>> loss = pipe.step(torch.ones(4, 2), torch.ones(4, 1), torch.nn.functional.mse_loss)
    >>> callback.on_log(logs={"loss": loss.item()})
    1.0
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._recording: gpipe.Recording | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.on_train_end()
        self._recording = gpipe.record(getattr(self._trainer, "pipe", None))  # type: ignore[arg-type]  # said there

    def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs and self._recording is not None and self._recording.runs:
            numbers = self._recording.metrics()
            numbers.pop("loss", None)  # the Trainer's own is beside them
            self.on_train_begin()
            self._trainer.log({f"gpipe/{name}": value for name, value in numbers.items()})

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._recording is not None:
            self._recording.stop()
