"""Finds and replaces tensors in trees: nested tuples, lists and dicts, as layers pass them on.

Rejects objects that hide tensors from torch's pytree functions, because a stage boundary would lose their gradients.
"""

import gc
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from gpipe._torch.trees import map_tensors, tree_leaves

Tree: TypeAlias = object
"""A tensor, or tuples, lists and dicts of tensors and other values."""


def tensors_in(value: Tree) -> list[Tensor]:
    """Returns the distinct tensors in a value, in order of first appearance."""
    if type(value) is Tensor:
        return [value]
    tensors: dict[int, Tensor] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors[id(leaf)] = leaf
    return [*tensors.values()]


def replace_tensors(value: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """Returns the value with `change` applied to each distinct tensor once."""
    if type(value) is Tensor:
        return change(value)
    changed: dict[int, Tensor] = {}

    def change_once(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    return map_tensors(value, change_once)


OPAQUE = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, torch.dtype, torch.device)
"""Types of values that hold no tensors of their own. The search for hidden tensors does not look inside them."""
MAX_OBJECTS = 100_000
"""Maximum number of objects that a search visits."""

HIDDEN_TENSORS = (
    "A layer returns an object of class {name}, which holds tensors. Use tuples, lists or dicts, or register its "
    "class with torch.utils._pytree.register_pytree_node. If it is a cache, pass use_cache=False. "
    "[tensors-in-unregistered-class]"
)


def hides_tensors(value: object, kind: type[Tensor] = Tensor) -> bool:
    """Whether an object refers to a tensor of type `kind` through attributes, slots, items or closures."""
    pending, seen = [value], {id(value)}
    while pending and len(seen) < MAX_OBJECTS:
        item = pending.pop()
        if isinstance(item, kind):
            return True
        if isinstance(item, OPAQUE):
            continue
        if isinstance(item, FunctionType):  # Exclude its globals, which reach the whole module.
            item = [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        for inner in gc.get_referents(item):
            if id(inner) not in seen:
                seen.add(id(inner))
                pending.append(inner)
    return False


def reject_hidden_tensors(value: object) -> None:
    """Raises a TypeError if a leaf of the value is an object that holds tensors."""
    for leaf in () if type(value) is Tensor else tree_leaves(value):
        if not isinstance(leaf, (Tensor, *OPAQUE)) and hides_tensors(leaf):
            raise TypeError(HIDDEN_TENSORS.format(name=type(leaf).__name__))
