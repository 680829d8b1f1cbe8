"""What of a message is no tensor, as text: the tree of a value, and its leaves. No pickle; what it may name is known.

A message names no class, module or attribute that the other end would look up by itself: only kinds of the table
below, and, by the name under which they were registered with torch's pytrees *in that process*, classes of the user.
"""

import json
import math
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from gpipe._torch.trees import (
    TreeSpec,
    context_reader,
    context_writer,
    registered_class,
    registered_name,
    tree_flatten,
    tree_unflatten,
)
from gpipe.stages.boundary import UNDEFINED, Undefined

KEPT = 1024  # trees
DEEPEST = 100  # containers around a leaf
DTYPES = {
    str(value).removeprefix("torch."): value
    for name in sorted(dir(torch))
    if isinstance(value := getattr(torch, name), torch.dtype)
}
"""What a message may name as a dtype."""
PLAIN = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict, "Size": torch.Size}
FACTORIES: dict[str | None, Any] = {
    None: None, "list": list, "dict": dict, "tuple": tuple, "set": set, "int": int, "float": float, "str": str,
}  # fmt: skip
"""What a message may name as what a defaultdict makes."""
OWN = frozenset({*PLAIN.values(), deque, defaultdict, namedtuple})
LEAF = tree_flatten(0)[1]

Json = Any
ADVICE = (
    "return tensors, tuples, lists, dicts (keys: strings, numbers, None, tuples of them), or register the class "
    "with torch.utils._pytree under a serialized_type_name, in every process"
)


@dataclass(frozen=True, slots=True)
class At:
    """A leaf of a tree that is a tensor: its number among the tensors of the message."""

    number: int


def write_tree(spec: TreeSpec) -> str:
    """The text of a tree, which `read_tree` reads; a TypeError where that could not make it again."""
    try:
        text = json.dumps(_written(spec))
        _rebuild(text)
        return text
    except (NotImplementedError, ValueError, TypeError, RecursionError) as error:
        raise TypeError(f"{spec} cannot go to another process: {error}; {ADVICE}") from error


@lru_cache(KEPT)
def _rebuild(text: str) -> None:
    """Builds such a tree, as the other end will."""
    read = read_tree(text)
    tree_unflatten([None] * read.num_leaves, read)


def _written(spec: TreeSpec) -> Json:
    """A tree in words of JSON: None for a leaf, else the kind, what belongs to it, and the children."""
    if spec.type is None:
        return None
    kind, context = spec.type, spec.context
    children = [_written(child) for child in spec.children()]
    if kind in (tuple, list, torch.Size):
        return [kind.__name__, None, children]
    if kind in (dict, OrderedDict):
        return [kind.__name__, [write_plain(key) for key in context], children]
    if kind is deque:
        return ["deque", context, children]
    if kind is defaultdict:
        return ["defaultdict", [_name_of_factory(context[0]), [write_plain(key) for key in context[1]]], children]
    if kind is namedtuple:
        return ["namedtuple", _registered_name(context), children]
    name = _registered_name(kind)
    write = context_writer(kind) or write_plain
    return [f"registered {name}", write(context), children]


def _registered_name(kind: type) -> str:
    name = registered_name(kind)
    if name is None:
        raise TypeError(f"{kind.__name__} is not registered under a name")
    return name


def _name_of_factory(factory: object) -> str | None:
    for name, known in FACTORIES.items():
        if known is factory:
            return name
    raise TypeError(
        f"a defaultdict that makes {factory!r} cannot be named; those of {', '.join(map(str, FACTORIES))} can"
    )


def read_tree(text: str) -> TreeSpec:
    """The tree that `write_tree` wrote. Nothing is imported for it, and no attribute looked up by name.

    Raises:
        ValueError: Nothing writes that, or it names what this process has not registered.
    """
    try:
        return _read(json.loads(text), DEEPEST)
    except RecursionError:
        raise ValueError("a tree too deep") from None


def _read(written: Json, deepest: int) -> TreeSpec:
    if written is None:
        return LEAF
    match written:
        case [str(kind), context, list(children)] if deepest:
            found = [_read(child, deepest - 1) for child in children]
        case _:
            raise ValueError(f"there is no tree that is written as {_shown(written)}")
    match kind, context:
        case (("tuple" | "list" | "Size"), None):
            return TreeSpec(PLAIN[kind], None, found)
        case (("dict" | "OrderedDict"), list(keys)) if len(keys) == len(found):
            return TreeSpec(PLAIN[kind], _keys(keys), found)
        case "deque", None | int():
            return TreeSpec(deque, context, found)
        case "defaultdict", [str() | None as made, list(keys)] if made in FACTORIES and len(keys) == len(found):
            return TreeSpec(defaultdict, [FACTORIES[made], _keys(keys)], found)
        case "namedtuple", str(name):
            known = _registered(name)
            if len(getattr(known, "_fields", ())) == len(found):
                return TreeSpec(namedtuple, known, found)
        case _ if kind.startswith("registered "):
            known = _registered(kind.removeprefix("registered "))
            read = context_reader(known) or read_plain
            return TreeSpec(known, read(context), found)
    raise ValueError(f"there is no tree that is written as {_shown(written)}")


def _registered(name: str) -> Any:
    known = registered_class(name)
    if known is None or known in OWN:
        raise ValueError(f"{name[:200]!r} is not registered with torch.utils._pytree in this process; register it")
    return known


def _keys(written: list[Json]) -> list[Any]:
    keys = list(map(read_plain, written))
    try:
        if len(set(keys)) == len(keys):
            return keys
    except TypeError:
        pass
    raise ValueError(f"these are no keys of a dict: {_shown(keys)}")


def write_plain(value: object) -> Json:
    """A key, or what a class keeps beside its tensors, in words of JSON."""
    kind = type(value)
    if kind is float and not math.isfinite(value):  # type: ignore[arg-type]  # a float then
        return {"float": repr(value)}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (tuple, list):
        return {kind.__name__: [write_plain(item) for item in value]}  # type: ignore[attr-defined]  # a container then
    raise TypeError(f"{value!r} is of type {kind.__name__}")


def read_plain(written: Json) -> Any:
    """What `write_plain` wrote."""
    match written:
        case None | bool() | int() | float() | str():
            return written
        case {"float": ("inf" | "-inf" | "nan") as value, **other} if not other:
            return float(value)
        case {"tuple": list(items), **other} if not other:
            return tuple(map(read_plain, items))
        case {"list": list(items), **other} if not other:
            return list(map(read_plain, items))
    raise ValueError(f"there is no value that is written as {_shown(written)}")


def _shown(written: object) -> str:
    text = repr(written)
    return text if len(text) < 100 else f"{text[:100]}..."


def write_leaf(leaf: object) -> list[Any]:
    """A leaf that is no tensor, in words of JSON: its type, and what it is."""
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


def read_leaf(written: Json) -> object:
    """What `write_leaf` wrote; `["tensor", number]` is where a tensor was."""
    match written:
        case ["tensor", int(number)] if number is not True and number >= 0:
            return At(number)
        case ["value", None | bool() | int() | float() | str() as value]:
            return value
        case ["complex", int() | float() as real, int() | float() as imaginary]:
            return complex(real, imaginary)
        case ["bytes", str(value)]:
            return bytes.fromhex(value)
        case ["size", *sizes] if all(type(size) is int for size in sizes):
            return torch.Size(sizes)
        case ["dtype", str(name)]:
            return read_dtype(name)
        case ["undefined"]:
            return UNDEFINED
    raise ValueError(f"there is no leaf that is written as {_shown(written)}")


def read_dtype(name: object) -> torch.dtype:
    """The dtype of a name."""
    if isinstance(name, str) and name in DTYPES:
        return DTYPES[name]
    raise ValueError(f"there is no dtype {_shown(name)}")
