"""Runs of a model that leave it as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gpipe.costs.layer_run import untouched
from gpipe.torch_private.fakes import is_fake
from gpipe.values.layout import copy_of
from gpipe.values.tree import replace_tensors, version

T = TypeVar("T")


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back what recordings inside change: modules, their state, torch's generator. Inside there is a graph.

    It shows what torch does not: functions of autograd.
    """
    with untouched(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Has a model be in training mode or not, and puts back the mode of each module."""
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def watched(model: nn.Module, run: Callable[[], T]) -> tuple[T, dict[str, Tensor | None]]:
    """What a run gives, and the buffers that it wrote, with their new values; they are put back."""
    before = {
        f"{path}.{key}".lstrip("."): (module._buffers, key, buffer, copy_of(buffer), version(buffer))
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta and not is_fake(buffer)
    }
    made = run()
    changed: dict[str, Tensor | None] = {}
    with torch.no_grad():
        for name, (held, key, buffer, copy, was) in before.items():
            now = held.get(key)
            if now is not buffer or version(buffer) != was:
                changed[name] = None if now is None else copy_of(now)
                held[key] = buffer
                buffer.copy_(copy)
    return made, changed


def copied(value: Any) -> Any:
    """Inputs for a forward to keep: it may work on them in place."""
    return replace_tensors(value, copy_of)
