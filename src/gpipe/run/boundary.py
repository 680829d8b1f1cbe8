"""What happens to a value where it leaves a stage: the graph is cut, and gradients find their way back.

A boundary tensor is a leaf that shares the maker's memory. It is read-only to both sides: a stage that works in place
on what it is given gets a copy (see `Stage`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gpipe.run.microbatch import Tree

Gradients: TypeAlias = list[Tensor | None]
"""What comes back for the leaves of a parcel."""


@dataclass(slots=True)
class Parcel:
    """A value as it crosses a boundary.

    `value` is what the next stage sees; `leaves` are its tensors that want a gradient, each once, in a fixed order.
    """

    value: Tree
    leaves: list[Tensor]

    @property
    def tensor(self) -> Tensor:
        """The value, where it is one tensor."""
        assert isinstance(self.value, Tensor)
        return self.value

    @property
    def stashed(self) -> Tensor | None:
        """The value of a skip route, which is one tensor, or None in its place."""
        return None if self.value is None else self.tensor


def cut(value: Tree) -> tuple[Parcel, list[Tensor]]:
    """Detaches a value from its graph: what to send, and the tensors of the graph that its leaves stand for.

    A tensor that appears twice stays one tensor, so that the gradients of its uses are summed in the same order as
    if there were no boundary.

    Raises:
        TypeError: Something in the value hides tensors where the boundary cannot see them.
    """
    if type(value) is Tensor:
        leaf = _leaf(value)
        return (Parcel(leaf, [leaf]), [value]) if value.requires_grad else (Parcel(leaf, []), [])
    flat, spec = pytree.tree_flatten(value)
    known: dict[int, Tensor] = {}
    roots, leaves = [], []
    for at, item in enumerate(flat):
        if not isinstance(item, Tensor):
            _refuse_hidden_tensors(item)
            continue
        if id(item) not in known:
            known[id(item)] = leaf = _leaf(item)
            if item.requires_grad:
                roots.append(item)
                leaves.append(leaf)
        flat[at] = known[id(item)]
    return Parcel(pytree.tree_unflatten(flat, spec), leaves), roots


def detached(value: Tree) -> Tree:
    """The value cut from its graph, for those who keep track of gradients themselves.

    Raises:
        TypeError: Something in the value hides tensors.
    """
    for item in pytree.tree_leaves(value):
        if not isinstance(item, Tensor):
            _refuse_hidden_tensors(item)
    return replace_tensors(value, Tensor.detach)


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if tensor.requires_grad else leaf


def _refuse_hidden_tensors(item: object) -> None:
    if item is None or isinstance(item, (bool, int, float, complex, str, bytes)):
        return
    held = (
        [getattr(item, f.name) for f in fields(item)]
        if is_dataclass(item)
        else list(getattr(item, "__dict__", {}).values())
    )
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(held)):
        raise TypeError(
            f"a {type(item).__name__} that holds tensors cannot cross to another stage, its gradients would be lost; "
            f"return tensors, tuples, lists or dicts, or register the class with torch.utils._pytree"
        )


def tensors_in(value: Tree) -> list[Tensor]:
    """The tensors in a value, each once, in order."""
    if type(value) is Tensor:
        return [value]
    return list({id(item): item for item in pytree.tree_leaves(value) if isinstance(item, Tensor)}.values())


def replace_tensors(value: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """The value with each tensor changed, a tensor that appears twice changed once."""
    if type(value) is Tensor:
        return change(value)
    known: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = change(tensor)
        return known[id(tensor)]

    return pytree.tree_map_only(Tensor, changed, value)


class KeptGradients:
    """Watches for the gradients of leaves during their backward, to keep the strides that they come with.

    Autograd lays a gradient out as its leaf is, and further back, where nothing was cut, sums over other strides end
    in other bits. So where the two differ, the gradient is kept as it came.
    """

    __slots__ = ("leaves", "strange")

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves
        self.strange: dict[int, Tensor] = {}
        for at, leaf in enumerate(leaves):
            leaf._backward_hooks = {0: partial(self._look, at)}  # register_hook without its 4 us

    def _look(self, at: int, gradient: Tensor | None) -> None:
        if gradient is not None and not (gradient.is_contiguous() and self.leaves[at].is_contiguous()):
            self.strange[at] = gradient

    def gradients(self) -> Gradients:
        """The gradient of each leaf, None where none came."""
        for leaf in self.leaves:
            leaf._backward_hooks = None  # it refers to this object, and this object to the leaf
        if not self.strange:
            return [leaf.grad for leaf in self.leaves]
        return [self.strange.get(at, leaf.grad) for at, leaf in enumerate(self.leaves)]


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Adds to `.grad` of all leaves, as `torch.autograd.backward` does, 29 us sooner."""
    known = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
    if known:
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(root for root, _ in known),
            tuple(gradient for _, gradient in known),
            False,  # keep_graph
            False,  # create_graph
            (),  # inputs: all leaves
            allow_unreachable=True,
            accumulate_grad=True,
        )
