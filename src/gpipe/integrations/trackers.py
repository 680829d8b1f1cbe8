"""Logs the time that a pipe's steps spend waiting and computing, for the trackers of a Trainer."""

from typing import Any

from transformers import TrainerCallback

import gpipe


class GPipeCallback(TrainerCallback):
    """Makes a Trainer log `recording.metrics()` of its pipe with each loss, for the steps since the last log.

    The names of the metrics begin with `gpipe/`. The recording reads the clock twice per action.

    Args:
        trainer: A Trainer with a `pipe` attribute, such as a `GPipeTrainer`.
        **record_options: Options of `gpipe.record`, such as `flops_per_row` and `device` to log the MFU.

    Raises:
        TypeError: If the trainer has no pipe when training begins.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], partitions=2, micro_batches=2)
    >>> trainer = SimpleNamespace(pipe=pipe, log=lambda numbers: print(numbers["gpipe/steps"]))
    >>> callback = GPipeCallback(trainer)  # with a real Trainer: trainer.add_callback(GPipeCallback(trainer))
    >>> callback.on_train_begin()
    >>> loss = pipe.step(torch.ones(4, 2), torch.ones(4, 1), torch.nn.functional.mse_loss)
    >>> callback.on_log(logs={"loss": loss.item()})
    1.0
    """

    def __init__(self, trainer: Any, **record_options: Any) -> None:
        self._trainer, self._options = trainer, record_options
        self._recording: gpipe.Recording | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.on_train_end()
        pipe: Any = getattr(self._trainer, "pipe", None)
        self._recording = gpipe.record(pipe, **self._options)  # rejects None

    def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs and self._recording is not None and self._recording.runs:
            metrics = self._recording.metrics()
            metrics.pop("loss", None)  # the Trainer logs its own
            self.on_train_begin()
            self._trainer.log({f"gpipe/{name}": value for name, value in metrics.items()})

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._recording is not None:
            self._recording.stop()
