"""Copies the training state between replicas, and saves the state that a repeated step must restore."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gpipe.stages.digest import checksum
from gpipe.stages.memory_layout import copy_of


def replica_state(module: nn.Module, stateful: Sequence[Any]) -> dict[str, Any]:
    """Returns weights, buffers and gradients of a module, and the `state_dict` of each object in `stateful`."""
    return {
        "tensors": [tensor.detach() for tensor in _tensors(module)],
        "gradients": [parameter.grad for parameter in module.parameters()],
        "stateful": [item.state_dict() for item in stateful],
    }


def describe_initial_state(module: nn.Module, stateful: Sequence[Any]) -> list[str]:
    """Returns texts that must be equal on all replicas, for the weights and buffers and for each `state_dict`."""
    initialized = [tensor for tensor in _tensors(module) if not tensor.is_meta and not is_lazy(tensor)]
    return [str(checksum(initialized)), *(f"{type(item).__name__} {item.state_dict()!r}" for item in stateful)]


def describe_classes(stateful: Sequence[Any]) -> list[str]:
    """Returns texts that describe the classes of objects and of their attributes, and the sizes of parameter groups.

    These texts must be equal on a replica that comes back, because `load_state_dict` does not reject the state of a
    different class.
    """
    return [text for item in stateful for text in _describe_class(item, set())]


def _describe_class(item: Any, known: set[int]) -> Iterator[str]:
    if id(item) in known:
        return
    known.add(id(item))
    sizes = [len(group["params"]) for group in item.param_groups] if isinstance(item, Optimizer) else ""
    yield f"{type(item).__module__}.{type(item).__qualname__} {sizes}"
    for name, value in sorted(getattr(item, "__dict__", {}).items()):
        for part in value if isinstance(value, (list, tuple)) else [value]:
            if hasattr(part, "load_state_dict") and not isinstance(part, type):
                yield f"{name}:"
                yield from _describe_class(part, known)


@torch.no_grad()
def load_replica_state(module: nn.Module, stateful: Sequence[Any], state: Mapping[str, Any]) -> None:
    """Loads the result of `replica_state` from another replica."""
    for tensor, value in zip(_tensors(module), state["tensors"], strict=True):
        tensor.copy_(value)
    for parameter, gradient in zip(module.parameters(), state["gradients"], strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    for item, item_state in zip(stateful, state["stateful"], strict=True):
        item.load_state_dict(item_state)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def save_gradients_and_buffers(module: nn.Module) -> Callable[[], None]:
    """Saves gradients and buffers of a module. Returns a function that restores both before a repeated step."""
    gradients = [(p, p.grad, None if p.grad is None else copy_of(p.grad)) for p in module.parameters()]
    buffers = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    copies = [
        (buffer, copy_of(buffer.detach()))
        for _, by_name in buffers
        for buffer in by_name.values()
        if buffer is not None and not is_lazy(buffer)
    ]

    def restore() -> None:
        with torch.no_grad():
            for part, by_name in buffers:
                part._buffers = dict(by_name)
            for buffer, copy in copies:
                buffer.copy_(copy)
            for parameter, gradient, values in gradients:
                if gradient is not None and values is not None:
                    gradient.copy_(values)
                parameter.grad = gradient

    return restore
