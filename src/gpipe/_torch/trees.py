"""Splits trees of values into leaves and structure. torch's own functions for this (pytree) are private.

Each action traverses the values that cross its stage boundary, which are mostly tuples, lists and dicts. This module
traverses these containers five times as fast as torch, and calls torch for other containers.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Size, Tensor
from torch.utils import _pytree
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

_LEAVES = frozenset({Tensor, int, float, bool, str, type(None)})  # types that are leaves for torch too


def tree_leaves(value: Any) -> list[Any]:
    """Returns the leaves of a value in order."""
    kind, leaves = type(value), list[Any]()
    if kind in _LEAVES:
        return [value]
    if kind is dict:
        value = value.values()
    elif kind is not list and kind is not tuple:
        return _pytree.tree_leaves(value)
    for item in value:
        if type(item) in _LEAVES:  # Most items: without a call.
            leaves.append(item)
        else:
            leaves += tree_leaves(item)
    return leaves


def map_tensors(value: Any, change: Callable[[Tensor], object]) -> Any:
    """Returns a value with `change` applied to each tensor among its leaves."""
    kind = type(value)
    if kind is Tensor:
        return change(value)
    if kind in _LEAVES or kind is Size:  # torch would turn a Size into a tuple
        return value
    if kind is list:
        return [map_tensors(item, change) for item in value]
    if kind is tuple:
        return tuple([map_tensors(item, change) for item in value])
    if kind is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return _pytree.tree_map_only(Tensor, change, value)


def registration(kind: type) -> Any:
    """Returns torch's registration of a class as a pytree node with a serialized name, or None.

    The registration has `serialized_type_name`, `to_dumpable_context` and the inverse of `to_dumpable_context`.
    """
    node = _pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    return None if node is None or node.serialized_type_name == _pytree.NO_SERIALIZED_TYPE_NAME_FOUND else node


def registered_class(name: str) -> type | None:
    """Returns the class that was registered as a pytree node with this serialized name, or None."""
    return None if name == _pytree.NO_SERIALIZED_TYPE_NAME_FOUND else _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)


class OpenDataclass:
    """A dataclass as a pytree node, because torch treats dataclasses as leaves. Unflattening recreates the object."""

    def __init__(self, kind: type, held: dict[str, Any]) -> None:
        self.kind, self.held = kind, held

    @staticmethod
    def create(values: Iterable[Any], kind_and_names: tuple[type, tuple[str, ...]]) -> object:
        """Creates an object of the dataclass with these field values, without calling its constructor."""
        kind, names = kind_and_names
        instance: object = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(instance, name, value)
        return instance


_pytree.register_pytree_node(
    OpenDataclass, lambda node: ([*node.held.values()], (node.kind, tuple(node.held))), OpenDataclass.create
)
