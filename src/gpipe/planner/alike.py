"""Which layers are alike, and what they take: of those that are, one run tells what each costs."""

from collections import OrderedDict
from collections.abc import Collection, Hashable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gpipe._torch.trees import tree_flatten
from gpipe.stages.tree import Tree

PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
"""Of which two that are equal are as good as one."""
NAMED = (type, FunctionType, BuiltinFunctionType)
"""Of which only one and the same will do."""


class _UnknownError(Exception):
    """Something of which it cannot be told what it does."""


def likeness(layer: nn.Module) -> Hashable | None:
    """Equal for layers that do the same but for their numbers; None if that cannot be told.

    All attributes must be known for what they are: that a layer prints like another is not enough.

    >>> likeness(nn.Linear(2, 3)) == likeness(nn.Linear(2, 3)) != likeness(nn.Linear(2, 3, bias=False))
    True
    """
    try:
        return _of_module(layer, {})
    except (_UnknownError, RecursionError):
        return None


def _of_module(module: nn.Module, seen: dict[int, int]) -> Hashable:
    if id(module) in seen:
        return "seen", seen[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        raise _UnknownError
    seen[id(module)] = len(seen)
    tensors = [
        (name, None if tensor is None else _of_tensor(tensor, seen))
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
    ]
    others = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers")}
    return type(module), tuple(tensors), _of(others, seen)


def _of(value: Any, seen: dict[int, int]) -> Hashable:
    kind: Any = type(value)
    if kind in PLAIN or kind in NAMED:
        return kind, value
    if kind in (tuple, list):
        return kind, tuple(_of(item, seen) for item in value)
    if kind in (dict, OrderedDict):
        return kind, tuple((_of(name, seen), _of(item, seen)) for name, item in value.items())
    if kind is set:
        return kind, frozenset(_of(item, seen) for item in value)
    if isinstance(value, nn.Module):
        return _of_module(value, seen)
    raise _UnknownError


def _of_tensor(tensor: Tensor, seen: dict[int, int]) -> Hashable:
    if id(tensor) in seen:
        return "seen", seen[id(tensor)]
    if type(tensor) not in (Tensor, nn.Parameter):
        raise _UnknownError
    seen[id(tensor)] = len(seen)
    return type(tensor), _layout(tensor)


def _layout(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def likeness_of_value(value: Tree, kept: Collection[int]) -> Hashable | None:
    """Equal for values of the same structure whose tensors are laid out alike; None if that cannot be told.

    Args:
        value: What a layer takes or gives.
        kept: Of which storages, by identity, it matters that they are.
    """
    leaves, structure = tree_flatten(value)
    seen: dict[int, int] = {}
    storages: dict[int, int] = {}
    found: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            number = storages.setdefault(id(storage), len(storages))
            where = leaf.storage_offset(), storage.nbytes(), number, id(storage) in kept
            found.append((seen.setdefault(id(leaf), len(seen)), _layout(leaf), where))
        elif type(leaf) in PLAIN:
            found.append((type(leaf), leaf))
        else:
            return None
    return structure, tuple(found)
