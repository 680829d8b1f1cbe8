"""Values as layers hand them on: trees of tensors.

Finds tensors inside of objects that torch's pytree takes for leaves, so that no boundary loses their gradients.
"""

import gc
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from gpipe._torch.trees import tree_leaves, tree_map_only

Tree: TypeAlias = object
"""A tensor, or tuples, lists and dicts of tensors and other values."""


def tensors_in(value: Tree) -> list[Tensor]:
    """The tensors in a value, each once, in order."""
    if type(value) is Tensor:
        return [value]
    return list({id(item): item for item in tree_leaves(value) if isinstance(item, Tensor)}.values())


def replace_tensors(value: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """The value with each tensor changed, a tensor that appears twice changed once."""
    if type(value) is Tensor:
        return change(value)
    known: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = change(tensor)
        return known[id(tensor)]

    return tree_map_only(Tensor, changed, value)


def version(tensor: Tensor | None) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


OPAQUE = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, torch.dtype, torch.device)
"""What holds no tensor of its own, however far it leads."""
MOST = 100_000  # objects that are looked at

HIDDEN = (
    "a {name} holds tensors where torch cannot see them (torch.utils._pytree takes it for a single value), so they "
    "would not be cut, split or given gradients; use tensors, tuples, lists or dicts, or register the class with "
    "torch.utils._pytree.register_pytree_node, or turn off what puts it there (a cache for generation: "
    "use_cache=False)"
)


def hides_tensors(item: object) -> bool:
    """Whether a tensor can be reached from an object, by whatever it refers to: attributes, slots, items, closures.

    >>> class Box: pass
    >>> box = Box(); box.inner = [{"deep": torch.ones(1)}]
    >>> hides_tensors(box), hides_tensors({box}), hides_tensors(Box()), hides_tensors(range(3))
    (True, True, False, False)
    """
    todo, seen = [item], {id(item)}
    while todo and len(seen) < MOST:
        found = todo.pop()
        if isinstance(found, Tensor):
            return True
        if isinstance(found, OPAQUE):
            continue
        if isinstance(found, FunctionType):  # but not the module that it stands in
            found = [found.__closure__, found.__defaults__, found.__kwdefaults__, found.__dict__]
        for inner in gc.get_referents(found):
            if id(inner) not in seen:
                seen.add(id(inner))
                todo.append(inner)
    return False


def refuse_hidden_tensors(value: object) -> None:
    """Refuses a value with leaves that hide tensors."""
    for leaf in () if type(value) is Tensor else tree_leaves(value):
        if not isinstance(leaf, (Tensor, *OPAQUE)) and hides_tensors(leaf):
            raise TypeError(HIDDEN.format(name=type(leaf).__name__))
