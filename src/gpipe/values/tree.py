"""Values as layers hand them on: trees of tensors."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from gpipe.torch_private.trees import tree_leaves, tree_map_only

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
