"""Trees of values: leaves in containers, and the structure apart from the leaves. torch has no public ones.

Each cell walks through what crosses, most of it tuples, lists and dicts: these are gone through here, five times as
fast, and all other containers as torch does.
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

_LEAVES = frozenset({Tensor, int, float, bool, str, type(None)})  # kinds that hold nothing, for torch as well


def tree_leaves(value: object) -> list[Any]:
    """The leaves of a value, in order."""
    leaves: list[Any] = []
    _gather(value, leaves)
    return leaves


def _gather(value: object, leaves: list[Any]) -> None:
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
    elif kind is list or kind is tuple:
        for item in value:  # type: ignore[attr-defined]
            _gather(item, leaves)
    elif kind is dict:
        for item in value.values():  # type: ignore[attr-defined]
            _gather(item, leaves)
    else:
        leaves.extend(_pytree.tree_leaves(value))


def map_tensors(value: Any, change: Callable[[Tensor], object]) -> Any:
    """The value with each tensor among its leaves changed."""
    kind = type(value)
    if kind is Tensor:
        return change(value)
    if kind in _LEAVES or kind is Size:  # which torch would make a tuple of
        return value
    if kind is list:
        return [map_tensors(item, change) for item in value]
    if kind is tuple:
        return tuple([map_tensors(item, change) for item in value])
    if kind is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return _pytree.tree_map_only(Tensor, change, value)


def registration(kind: type) -> Any:
    """How a class was registered with torch's trees: its `serialized_type_name`, `to_dumpable_context` and reverse.

    None where it was not, or without a name.
    """
    known = _pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    return None if known is None or known.serialized_type_name == _pytree.NO_SERIALIZED_TYPE_NAME_FOUND else known


def registered_class(name: str) -> type | None:
    """The class that was registered with torch's trees under a name, if there is one."""
    return None if name == _pytree.NO_SERIALIZED_TYPE_NAME_FOUND else _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)


class OpenDataclass:
    """A dataclass as a node of torch's trees, which take those for leaves; flat, it is made of its fields."""

    def __init__(self, kind: type, held: dict[str, Any]) -> None:
        self.kind, self.held = kind, held

    @staticmethod
    def made(values: Iterable[Any], kind_and_names: tuple[type, tuple[str, ...]]) -> object:
        """An object of the dataclass with these values in its fields."""
        kind, names = kind_and_names
        made: object = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made


_pytree.register_pytree_node(
    OpenDataclass, lambda one: ([*one.held.values()], (one.kind, tuple(one.held))), OpenDataclass.made
)
