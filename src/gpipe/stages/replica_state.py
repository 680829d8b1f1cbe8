"""The state of a replica: what one that comes back is given, and what a step that is done again begins with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe.stages.digest import checksum
from gpipe.stages.tree import copy_of


def state_of(module: nn.Module, stateful: Sequence[Any]) -> dict[str, Any]:
    """Weights, buffers, gradients, and the state of whatever else has a `state_dict`."""
    return {
        "tensors": [tensor.detach() for tensor in _tensors(module)],
        "gradients": [parameter.grad for parameter in module.parameters()],
        "stateful": [one.state_dict() for one in stateful],
    }


def beginning_of(module: nn.Module, stateful: Sequence[Any]) -> list[str]:
    """What replicas begin with alike: a checksum of weights and buffers, and what else has a state, in words."""
    held = [tensor for tensor in _tensors(module) if not tensor.is_meta and not is_lazy(tensor)]
    return [str(checksum(held)), *(f"{type(one).__name__} {one.state_dict()!r}" for one in stateful)]


@torch.no_grad()
def take_state(module: nn.Module, stateful: Sequence[Any], state: Mapping[str, Any]) -> None:
    """Puts the state of another replica in place of this one's."""
    for tensor, value in zip(_tensors(module), state["tensors"], strict=True):
        tensor.copy_(value)
    for parameter, gradient in zip(module.parameters(), state["gradients"], strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    for one, own in zip(stateful, state["stateful"], strict=True):
        one.load_state_dict(own)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def undo_of(module: nn.Module) -> Callable[[], None]:
    """What puts back gradients and buffers as they are now, for a step that is done again."""
    gradients = [(p, p.grad, None if p.grad is None else copy_of(p.grad)) for p in module.parameters()]
    buffers = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    copies = [
        (b, copy_of(b.detach())) for _, own in buffers for b in own.values() if b is not None and not is_lazy(b)
    ]

    def undo() -> None:
        with torch.no_grad():
            for part, own in buffers:
                part._buffers = dict(own)
            for buffer, copy in copies:
                buffer.copy_(copy)
            for parameter, gradient, before in gradients:
                if gradient is not None and before is not None:
                    gradient.copy_(before)
                parameter.grad = gradient

    return undo
