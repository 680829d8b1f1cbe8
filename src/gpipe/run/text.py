"""What of a message is no tensor, as text: the tree of a value, and its leaves. No pickle."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpipe.run.boundary import UNDEFINED, Undefined

KEPT = 1024  # trees


@dataclass(frozen=True, slots=True)
class At:
    """A leaf of a tree that is a tensor: its number among the tensors of the message."""

    number: int


def write_tree(spec: pytree.TreeSpec) -> str:
    """The text of a tree, which `pytree.treespec_loads` reads.

    Raises:
        TypeError: It cannot be read again as what it is.
    """
    outline = _outline(spec)
    return _text(spec) if outline is None else _text_of(_Outlined(outline, spec))


@dataclass(frozen=True, slots=True)
class _Outlined:
    """A spec that is known by its outline."""

    outline: Hashable
    spec: pytree.TreeSpec = field(compare=False)


def _outline(spec: pytree.TreeSpec) -> Hashable:
    """What two specs share only if they are the same, or None: as dicts 1 and True are one key, in text two."""
    if spec.type is None:
        return "leaf"
    keys = spec.context or ()
    if spec.type in (tuple, list) or (spec.type in (dict, OrderedDict) and all(type(key) is str for key in keys)):
        children = tuple(map(_outline, spec.children()))
        return None if None in children else (spec.type, tuple(keys), children)
    return None


@lru_cache(KEPT)
def _text_of(known: _Outlined) -> str:
    return _text(known.spec)


def _text(spec: pytree.TreeSpec) -> str:
    try:
        text = pytree.treespec_dumps(spec)
        _rebuild(text)
        return text
    except (NotImplementedError, ValueError, TypeError) as error:
        raise TypeError(
            f"{spec} cannot go to another process: {error}; return tensors, tuples, lists and dicts, or "
            f"register the class with torch.utils._pytree under a serialized_type_name"
        ) from error


@lru_cache(KEPT)
def _rebuild(spec: str) -> None:
    """Builds such a tree, as the other end will: not every key of a dict is the same when it comes from JSON."""
    read = pytree.treespec_loads(spec)
    pytree.tree_unflatten([None] * read.num_leaves, read)


def write_leaf(leaf: object) -> list[Any]:
    """A leaf that is no tensor, in words of JSON: its type, and what it is.

    Raises:
        TypeError: It is nothing that can go to another process.
    """
    match leaf:
        case None | bool() | int() | float() | str() if type(leaf) in (type(None), bool, int, float, str):
            return ["value", leaf]
        case complex():
            return ["complex", leaf.real, leaf.imag]
        case bytes():
            return ["bytes", leaf.hex()]
        case torch.Size():
            return ["size", *leaf]
        case torch.dtype():
            return ["dtype", str(leaf).removeprefix("torch.")]
        case Undefined():
            return ["undefined"]
    raise TypeError(
        f"a {type(leaf).__name__} cannot go to another process; return tensors, numbers, strings, None, or tuples, "
        f"lists and dicts of them"
    )


def read_leaf(written: Sequence[Any]) -> object:
    """What `write_leaf` wrote; `["tensor", number]` is where a tensor was."""
    kind, *parts = written
    match kind:
        case "tensor":
            return At(parts[0])
        case "complex":
            return complex(*parts)
        case "bytes":
            return bytes.fromhex(parts[0])
        case "size":
            return torch.Size(parts)
        case "dtype":
            return getattr(torch, parts[0])
        case "undefined":
            return UNDEFINED
        case _:
            return parts[0]
