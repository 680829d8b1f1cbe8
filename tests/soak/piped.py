"""The library behind the face of the loop."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import gpipe
from tests.support.kinds.case import Case, Setting

from .reference import Trainer


class Piped(Trainer):
    """A `gpipe.GPipe` over the case's layers."""

    def __init__(self, case: Case, setting: Setting) -> None:
        self.case, self.setting = case, setting
        arguments: dict[str, Any] = {
            "partitions": setting.cut,
            "micro_batches": setting.micro_batches,
            "remat": setting.remat,
            "driver": setting.driver,
            "seed": setting.seed,
        }
        self.pipe = gpipe.GPipe(case.layers, **(arguments | case.options))
        self.model = self.pipe

    def step(self, inputs: Any, targets: Any) -> Any:
        return self.pipe.step(inputs, targets, self.case.loss)

    def forward(self, inputs: Any) -> Any:
        return self.pipe(inputs)

    def backward(self, loss: torch.Tensor, *outputs: Any) -> None:
        loss.backward()

    def close(self) -> None:
        self.pipe.close()

    def findings(self) -> list[str]:
        return [str(finding) for finding in getattr(self.pipe, "findings", ())]


class _Listener(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__()
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        self.into.append(record.getMessage())


@contextlib.contextmanager
def listening(into: list[str]) -> Iterator[None]:
    """Collects warnings and log records."""
    handler = _Listener(into)
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        into.extend(str(warning.message) for warning in caught)
