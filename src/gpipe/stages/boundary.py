"""Detaches the values that leave a stage from its autograd graph, and returns gradients across the stage boundary.

A boundary tensor is a leaf that shares memory with the tensor that the earlier stage computed. Neither stage may
change it in place: a recomputation, and the graph of the earlier stage, still need its values.

This module also searches the autograd graph: for the leaves that a backward reaches, for tensors that were computed
from other tensors, and for the node that raised an error.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from operator import attrgetter
from traceback import walk_tb
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gpipe._torch.autograd import LEAF_NODE, accumulate_gradients, is_held, memory_users, node_number
from gpipe.stages.memory_layout import copy_of, storage_address, versions
from gpipe.stages.tree import Tree, hides_tensors, reject_hidden_tensors, replace_tensors, tensors_in


class Undefined(Enum):
    """Marks an undefined gradient: autograd runs the next node of the backward pass with None as its gradient."""

    UNDEFINED = "undefined"


UNDEFINED = Undefined.UNDEFINED
Gradients: TypeAlias = list[Tensor | Undefined | None]
"""The gradients of the leaves of a `BoundaryValue`. The entry is None for a leaf that no output depends on."""

INPUT_CHANGED = (
    "{stage}: its input was changed in place before the backward, which needs the original values. Return a clone "
    "from the layer before, and do not change inputs until the backward has finished. [input-changed-in-place]"
)
NESTED_AT_BOUNDARY = (
    "A layer passes a nested tensor to another partition. Convert it with torch.nested.to_padded_tensor(t, 0.0), or "
    "keep both layers in one partition. [nested-tensor-at-boundary]"
)
SPARSE_AT_BOUNDARY = (
    "A layer passes a sparse tensor that requires a gradient to another partition. Convert it with t.to_dense(), or "
    "keep both layers in one partition. [sparse-tensor-at-boundary]"
)


@dataclass(slots=True)
class BoundaryValue:
    """A value that crosses a stage boundary.

    Attributes:
        value: The value that the next stage receives.
        leaves: The distinct tensors in the value that require a gradient, in a fixed order.
        ancestors: Indices of the leaves that the stage also uses to compute other outputs. The gradient of such a
            leaf is only complete in this stage. None if the indices are not known.
        sharing: Indices of tensors that share memory in the stage that computed them. In the next stage, they may be
            separate copies.
        versions: The versions of the tensors in the value. None until `check` records them.
    """

    value: Any
    leaves: list[Tensor]
    ancestors: frozenset[int] | None = None
    sharing: frozenset[int] = frozenset()
    versions: tuple[int, ...] | None = None

    def check(self, stage: object) -> None:
        """Raises a RuntimeError if a tensor was changed in place since its version was recorded.

        The first call records the versions if they are not known.
        """
        current = versions(tensors_in(self.value))
        if self.versions is not None and self.versions != current:
            raise RuntimeError(INPUT_CHANGED.format(stage=stage))
        self.versions = current


def detach_boundary(value: Tree) -> tuple[BoundaryValue, list[Tensor]]:
    """Detaches a value from its autograd graph.

    A tensor that appears twice stays one tensor. The gradients of its uses are then summed in the same order as
    without a stage boundary.

    Returns:
        The value to send, and the tensors of the graph that correspond to its leaves.

    Raises:
        TypeError: If the value contains a nested tensor, a sparse tensor that requires a gradient, or an object that
            holds tensors but is not a registered pytree node.
    """
    reject_hidden_tensors(value)
    roots: list[Tensor] = []
    leaves: list[Tensor] = []

    def detach(tensor: Tensor) -> Tensor:
        if tensor.is_nested:
            raise TypeError(NESTED_AT_BOUNDARY)
        if tensor.layout is not torch.strided and tensor.requires_grad:
            raise TypeError(SPARSE_AT_BOUNDARY)
        leaf = carry_attributes(tensor, tensor.detach())
        if tensor.requires_grad:
            roots.append(tensor)
            leaves.append(leaf.requires_grad_())
        return leaf

    return BoundaryValue(replace_tensors(value, detach), leaves), roots


def detached(value: Tree) -> Tree:
    """Returns the value with all tensors detached, for callers that track gradients themselves."""
    reject_hidden_tensors(value)
    return replace_tensors(value, lambda tensor: carry_attributes(tensor, tensor.detach()))


@dataclass(frozen=True, slots=True)
class Output:
    """The detached output of the last stage for a micro-batch, and which of its tensors required a gradient."""

    value: Tree
    wants_gradient: tuple[bool, ...]

    @classmethod
    def of(cls, value: Tree) -> "Output":
        wants_gradient = tuple(tensor.requires_grad for tensor in tensors_in(value))
        return cls(detached(value), wants_gradient)


def carry_attributes(tensor: Tensor, target: Tensor) -> Tensor:
    """Copies the attributes that user code has set on `tensor` to `target`, and returns `target`.

    Raises:
        TypeError: If an attribute holds tensors.
    """
    for name, attribute in vars(tensor).items():
        if isinstance(attribute, Tensor) or hides_tensors(attribute):
            raise TypeError(
                f"The attribute {name!r} of a tensor holds tensors, whose gradients would be lost at the stage "
                f"boundary. Return a tuple or a dict with all tensors instead. [tensor-in-attribute]"
            )
        setattr(target, name, attribute)
    return target


def copy_boundary(boundary: BoundaryValue) -> BoundaryValue:
    """Copies a boundary value, including the memory layout of its tensors."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        copied = carry_attributes(tensor, copy_of(tensor.detach())).requires_grad_(tensor.requires_grad)
        copies[id(tensor)] = copied
        return copied

    value = replace_tensors(boundary.value, copy)
    return replace(boundary, value=value, leaves=[copies[id(leaf)] for leaf in boundary.leaves], versions=None)


class BoundaryInput(NamedTuple):
    """A boundary value in the form in which one run of a stage receives it.

    Attributes:
        value: The value, in which an alias replaces each leaf.
        aliases: The aliases of the leaves.
        gradients: The gradients of the leaves, filled in by the backward.
        hooks: For each alias, a function that returns the hooks on its autograd node. One of these hooks belongs to
            gpipe.
    """

    value: Any
    aliases: Sequence[Tensor]
    gradients: Gradients
    hooks: Sequence[Callable[[], Sized | None]]


def attach_boundary(boundary: BoundaryValue) -> BoundaryInput:
    """Prepares a boundary value for one run of a stage.

    The run receives an alias of each leaf, with its own autograd node:

    - Layers see a tensor with a `grad_fn`, as without a stage boundary.
    - Hooks that layers register on the alias belong to this run only.
    - The gradient of the alias is stored as autograd computes it, with its strides and alignment. The `.grad` of a
      leaf could have a different layout.
    """
    if not boundary.leaves:
        return BoundaryInput(boundary.value, (), [], ())
    gradients: Gradients = [None] * len(boundary.leaves)
    aliases: dict[int, Tensor] = {}
    hooks: list[Callable[[], Sized | None]] = []
    for index, leaf in enumerate(boundary.leaves):
        alias = aliases[id(leaf)] = leaf.expand_as(leaf)  # Unlike `view_as`, it keeps all strides.
        if (node := alias.grad_fn) is not None:  # None under no_grad, where no gradient arrives.
            hooks.append(node.register_hook(partial(_keep, gradients, index)).hooks_dict_ref)
        carry_attributes(leaf, alias)
    value = replace_tensors(boundary.value, lambda tensor: aliases.get(id(tensor), tensor))
    return BoundaryInput(value, list(aliases.values()), gradients, hooks)


def _keep(gradients: Gradients, index: int, inputs: object, outputs: tuple[Tensor | None, ...]) -> tuple[None]:
    """Stores the gradient of an alias. Returns None as the gradient of the leaf, so that its `.grad` stays unset."""
    gradients[index] = UNDEFINED if outputs[0] is None else outputs[0]
    return (None,)


def run_backward(roots: Sequence[Tensor], gradients: Gradients) -> None:
    """Runs `torch.autograd.backward` from the roots that have a gradient."""
    known, values = known_roots(roots, gradients)
    if known:
        accumulate_gradients(known, values)


def known_roots(roots: Sequence[Tensor], gradients: Gradients) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns the roots from which a backward starts, and a gradient for each.

    Omits roots whose gradient is None. Replaces a root that has an undefined gradient by a tensor computed from the
    root. The backward of this tensor passes None to the root's node, so autograd runs the node without a gradient.
    """
    if {Tensor}.issuperset(map(type, gradients)):  # The common case.
        return roots, gradients  # type: ignore[return-value]  # all are tensors
    known: list[Tensor] = []
    values: list[Tensor] = []
    for root, gradient in zip(roots, gradients, strict=True):
        if gradient is None:
            continue
        if isinstance(gradient, Undefined):
            with torch.enable_grad():
                root = _PassNone.apply(root)  # type: ignore[no-untyped-call]  # untyped in torch
            gradient = torch.zeros_like(root)
        known.append(root)
        values.append(gradient)
    return known, values


def clone_shared_gradients(gradients: Iterable[list[Any]], kept: Iterable[Tensor] = ()) -> None:
    """Copies gradients that share memory with other tensors, because a sent gradient must have its own memory.

    A gradient can share memory with:

    - a gradient of another node, because autograd passes the same tensor to several nodes,
    - the `.grad` of a leaf, to which later micro-batches add,
    - memory that a custom function reuses for all its gradients.

    Args:
        gradients: Lists of gradients, changed in place.
        kept: Tensors that are still in use, with which no gradient may share memory.
    """
    known = set(map(storage_address, kept))
    for row in gradients:
        for i in range(len(row)):  # Do not assign row[i] to a variable: `is_held` counts references.
            address = storage_address(row[i]) if isinstance(row[i], Tensor) else 0
            if address and (address in known or memory_users(row[i]) > 1 or is_held(row, i)):
                row[i] = copy_of(row[i])
            known.add(address)


class _PassNone(torch.autograd.Function):
    """Passes None as the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, root: Tensor) -> Tensor:
        return root.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def find_ancestors(roots: Sequence[Tensor]) -> set[int]:
    """Returns the indices of roots that appear twice, or from which another root was computed."""
    seen: set[Node | None] = {None}
    root_edges: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, roots)]
    edges = [*root_edges]
    for node, _ in edges:  # The list grows during the loop.
        if node not in seen:
            seen.add(node)
            edges += node.next_functions
    inner, times = set(edges[len(roots) :]), Counter(root_edges)
    return {index for index, edge in enumerate(root_edges) if edge in inner or times[edge] > 1}


def leaves_of(roots: Iterable[Tensor], until: Collection[Node] = ()) -> list[Tensor]:
    """Returns the leaves that a backward from these tensors reaches.

    Args:
        roots: The tensors at which the backward starts.
        until: Nodes at which the search stops.
    """
    seen: set[Node | None] = {None, *until}
    leaves: list[Tensor] = []
    nodes: list[Any] = [*map(attrgetter("grad_fn"), roots)]
    for node in nodes:  # The list grows during the loop.
        if node in seen:
            continue
        seen.add(node)
        if type(node) is LEAF_NODE:
            leaves.append(node.variable)
        else:
            for next_node, _ in node.next_functions:  # Faster than `map`: most nodes have one or two.
                nodes.append(next_node)
    return leaves


def failed_node(error: BaseException) -> int | None:
    """Returns the sequence number of the autograd node that raised an error, or None for nodes written in C++."""
    for frame, _ in walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node_number(node)
    return None
