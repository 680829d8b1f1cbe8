"""Runs a model without values: what is on the meta device has only a layout, and so has all that comes of it.

A unit whose layout depends on values, as that of experts to which tokens are sent, runs by itself on zeros.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpipe._torch.dispatcher import NEEDS_VALUES, Fakes, is_fake
from gpipe._torch.trees import tree_map_only
from gpipe.stages.shared_weights import put_parameter
from gpipe.tracing.leftovers import lacks_memory
from gpipe.tracing.placeholder import CannotSplitError
from gpipe.tracing.trace import Call

BRANCHES = (
    "{name} needs values between blocks, and the model is on the meta device and has none: its path depends on them. "
    "Build it for real, or name other blocks: blocks=[...]"
)


def lacks_values(model: nn.Module) -> bool:
    """Whether some parameters of a model are on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


class Dry:
    """Does the events of a model without values."""

    def __init__(self) -> None:
        self._fakes = Fakes()

    @contextmanager
    def faking(self, model: nn.Module) -> Iterator[None]:
        """Has the modules of a model have tensors without values that say to be on the CPU."""
        known: dict[int, Tensor] = {}
        with ExitStack() as back:
            for module in model.modules():
                for held in _held_by(module):
                    for name, tensor in held.items():
                        if tensor is not None and tensor.is_meta:
                            made = known.setdefault(id(tensor), self._fakes.like(tensor))
                            back.callback(_put, module, held, name, tensor)
                            _put(module, held, name, made)
            yield

    def do(self, call: Call) -> Any:
        """Does an event."""
        unit = call.unit
        try:
            with self._fakes.inside():
                return call.do()
        except Exception as error:  # some operations of units cannot be done without values, or not yet
            if unit is None and isinstance(error, NEEDS_VALUES):
                raise CannotSplitError(BRANCHES.format(name=call.name)) from error
            if unit is None or lacks_memory(error):
                raise
        return self._on_zeros(unit, call)

    def _on_zeros(self, unit: nn.Module, call: Call) -> Any:
        with ExitStack() as back, torch.no_grad():
            for module in unit.modules():
                for held in _held_by(module):
                    for name, tensor in held.items():
                        if is_fake(tensor):
                            back.callback(_put, module, held, name, tensor)
                            _put(module, held, name, _zeros(tensor))
            made = call.given(_zeros).do()
        return tree_map_only(Tensor, lambda tensor: tensor if is_fake(tensor) else self._fakes.like(tensor), made)


def _held_by(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _put(module: nn.Module, held: dict[str, Any], name: str, tensor: Tensor | None) -> None:
    if held is module._parameters:
        put_parameter(module, name, tensor)
    else:
        held[name] = tensor


def _zeros(tensor: Any) -> Any:
    if not is_fake(tensor):
        return tensor
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
