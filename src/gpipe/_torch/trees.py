"""Trees of values: leaves in containers, and the structure apart from the leaves. torch has no public ones."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten


def registered_name(kind: type) -> str | None:
    """The name under which a class was registered with torch's trees, if it has one."""
    known = _pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    name = None if known is None else known.serialized_type_name
    return None if name == _pytree.NO_SERIALIZED_TYPE_NAME_FOUND else name


def registered_class(name: str) -> type | None:
    """The class that was registered with torch's trees under a name, if there is one."""
    return None if name == _pytree.NO_SERIALIZED_TYPE_NAME_FOUND else _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)


def context_writer(kind: type) -> Callable[[Any], Any] | None:
    """What turns the context of a registered class into plain values, if that was registered."""
    return _pytree.SUPPORTED_SERIALIZED_TYPES[kind].to_dumpable_context


def context_reader(kind: type) -> Callable[[Any], Any] | None:
    """What makes the context of a registered class of plain values, if that was registered."""
    return _pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context


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
