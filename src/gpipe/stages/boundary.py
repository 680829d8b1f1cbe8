"""Cuts the autograd graph where a value leaves a stage, and brings gradients back across the cut.

A boundary tensor is a leaf that shares the maker's memory. It is read-only to both sides: changed in place, it would
be wrong for a recompute, and for the graph of the stage that made it.

Asks the autograd graph which leaves a backward reaches, which tensors others were made from, which node raised.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from traceback import walk_tb
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gpipe._torch.autograd import (
    LEAF_NODE,
    accumulate_gradients,
    is_held,
    memory_users,
    node_number,
)
from gpipe.stages.memory_layout import copy_of, storage_address, versions
from gpipe.stages.tree import Tree, hides_tensors, reject_hidden_tensors, replace_tensors, tensors_in


class Undefined(Enum):
    """What autograd brings where a backward gave None: the node behind it runs all the same."""

    UNDEFINED = "undefined"


UNDEFINED = Undefined.UNDEFINED
Gradients: TypeAlias = list[Tensor | Undefined | None]
"""What comes back for the leaves of a crossing; None where nothing did, because nothing depends on the leaf."""

CHANGED = (
    "what {stage} was given has been changed in place since it was handed on: by the layer that made it, in a later "
    "micro-batch (a buffer or a workspace that it returns and writes again), or by the caller, who wrote into the "
    "inputs before the backward. Return a clone, and leave inputs alone until the backward is done"
)
NO_STRIDES = (
    "a {kind} tensor {why} cannot cross a cut; return it dense ({remedy}), or keep both layers in one partition"
)


@dataclass(slots=True)
class BoundaryValue:
    """A value as it crosses a boundary."""

    value: Any  # what the next stage sees
    leaves: list[Tensor]  # its tensors that want a gradient, each once, in a fixed order
    # leaves from which others that cross were made, if that is known here: their gradient is whole only there
    ancestors: frozenset[int] | None = None
    sharing: frozenset[int] = frozenset()  # the places of tensors that share memory here, and need not on arrival
    versions: tuple[int, ...] | None = None  # of its tensors, as far as they are noted

    def check(self, stage: object) -> None:
        """Checks that nobody has changed the tensors of the value since it was handed on, or first looked at."""
        now = versions(tensors_in(self.value))
        if self.versions is not None and self.versions != now:
            raise RuntimeError(CHANGED.format(stage=stage))
        self.versions = now


def detach_boundary(value: Tree) -> tuple[BoundaryValue, list[Tensor]]:
    """Detaches a value from its graph: what to send, and the tensors of the graph that its leaves stand for.

    A tensor that appears twice stays one tensor, so that the gradients of its uses are summed in the same order as
    if there were no boundary.
    """
    reject_hidden_tensors(value)
    roots: list[Tensor] = []
    leaves: list[Tensor] = []

    def cut(tensor: Tensor) -> Tensor:
        if tensor.is_nested:
            raise TypeError(NO_STRIDES.format(kind="nested", why="", remedy="torch.nested.to_padded_tensor(t, 0.0)"))
        if tensor.layout is not torch.strided and tensor.requires_grad:
            raise TypeError(NO_STRIDES.format(kind="sparse", why="that wants a gradient", remedy="t.to_dense()"))
        leaf = carry_attributes(tensor, tensor.detach())
        if tensor.requires_grad:
            roots.append(tensor)
            leaves.append(leaf.requires_grad_())
        return leaf

    return BoundaryValue(replace_tensors(value, cut), leaves), roots


def detached(value: Tree) -> Tree:
    """The value cut from its graph, for those who keep track of gradients themselves."""
    reject_hidden_tensors(value)
    return replace_tensors(value, lambda tensor: carry_attributes(tensor, tensor.detach()))


@dataclass(frozen=True, slots=True)
class Output:
    """What the last stage made of a micro-batch, cut from its graph; `wants_gradient` says it of each tensor."""

    value: Tree
    wants_gradient: tuple[bool, ...]

    @classmethod
    def of(cls, value: Tree) -> "Output":
        wants = tuple(tensor.requires_grad for tensor in tensors_in(value))
        return cls(detached(value), wants)


def carry_attributes(tensor: Tensor, other: Tensor) -> Tensor:
    """Gives another tensor the attributes that somebody's code has put on this one; none may hold tensors."""
    for name, attribute in vars(tensor).items():
        if isinstance(attribute, Tensor) or hides_tensors(attribute):
            raise TypeError(
                f"the attribute {name!r} of a tensor holds tensors, whose gradients would be lost behind the cut; "
                f"return a tuple or a dict of both"
            )
        setattr(other, name, attribute)
    return other


def copy_boundary(crossing: BoundaryValue) -> BoundaryValue:
    """A copy of a value that crossed a boundary: its tensors lie in memory as those of the original do."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        other = carry_attributes(tensor, copy_of(tensor.detach())).requires_grad_(tensor.requires_grad)
        copies[id(tensor)] = other
        return other

    value = replace_tensors(crossing.value, copied)
    return replace(crossing, value=value, leaves=[copies[id(leaf)] for leaf in crossing.leaves], versions=None)


class BoundaryInput(NamedTuple):
    """A value as one run of a stage is given it, the aliases of its leaves, and where their gradients will be."""

    value: Any
    aliases: Sequence[Tensor]
    gradients: Gradients
    hooks: Sequence[Callable[[], Sized | None]]  # of each alias, the hooks on its node: ours is one


def attach_boundary(crossing: BoundaryValue) -> BoundaryInput:
    """Gives a value that crossed a boundary to one run of a stage.

    Each leaf has an alias with a node of its own: for the layers it is a tensor that others made, the hooks that they
    put on it are of this run alone, and what comes back is kept as autograd brings it, with its strides and
    alignment (autograd would lay it out anew as `.grad` of a leaf).
    """
    if not crossing.leaves:
        return BoundaryInput(crossing.value, (), [], ())
    gradients: Gradients = [None] * len(crossing.leaves)
    aliases: dict[int, Tensor] = {}
    hooks: list[Callable[[], Sized | None]] = []
    for at, leaf in enumerate(crossing.leaves):
        alias = aliases[id(leaf)] = leaf.expand_as(leaf)  # a view, and unlike one of `view_as` with every stride
        if (node := alias.grad_fn) is not None:  # under no_grad there is nothing to come back
            hooks.append(node.register_hook(partial(_keep, gradients, at)).hooks_dict_ref)
        carry_attributes(leaf, alias)
    value = replace_tensors(crossing.value, lambda tensor: aliases.get(id(tensor), tensor))
    return BoundaryInput(value, list(aliases.values()), gradients, hooks)


def _keep(gradients: Gradients, at: int, passed: object, came: tuple[Tensor | None, ...]) -> tuple[None]:
    gradients[at] = UNDEFINED if came[0] is None else came[0]
    return (None,)  # nothing for `.grad`


def run_backward(roots: Sequence[Tensor], gradients: Gradients) -> None:
    """Adds to `.grad` of all leaves, as `torch.autograd.backward` does, from those roots that have a gradient."""
    known, values = known_roots(roots, gradients)
    if known:
        accumulate_gradients(known, values)


def known_roots(roots: Sequence[Tensor], gradients: Gradients) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The roots from which a backward starts, and a gradient for each."""
    if {Tensor}.issuperset(map(type, gradients)):  # as most
        return roots, gradients  # type: ignore[return-value]  # as it says
    known: list[Tensor] = []
    values: list[Tensor] = []
    for root, gradient in zip(roots, gradients, strict=True):
        if gradient is None:
            continue
        if isinstance(gradient, Undefined):  # a root behind this one makes autograd run this one's node without one
            with torch.enable_grad():
                root = _Nothing.apply(root)  # type: ignore[no-untyped-call]  # untyped in torch
            gradient = torch.zeros_like(root)
        known.append(root)
        values.append(gradient)
    return known, values


def clone_shared_gradients(gradients: Iterable[list[Any]], kept: Iterable[Tensor] = ()) -> None:
    """Puts a copy in place of each gradient that shares memory: with another, with what is kept, with a `.grad`.

    Autograd hands one gradient to several nodes, and has a leaf without `.grad` take a view of one for its own, to
    which later micro-batches add; and a function may have one place for the gradients of all. What goes to another
    stage must be its own alone.
    """
    known = set(map(storage_address, kept))
    for some in gradients:
        for at in range(len(some)):  # no variable refers to a gradient here: references are counted
            address = storage_address(some[at]) if isinstance(some[at], Tensor) else 0
            if address and (address in known or memory_users(some[at]) > 1 or is_held(some, at)):
                some[at] = copy_of(some[at])
            known.add(address)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: Tensor) -> Tensor:
        return root.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def find_ancestors(roots: Sequence[Tensor]) -> set[int]:
    """The indices of the tensors from which others of them were computed, or that are there twice."""
    seen: set[Node | None] = {None}
    own: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, roots)]
    edges = [*own]
    for node, _ in edges:  # which grow meanwhile
        if node not in seen:
            seen.add(node)
            edges += node.next_functions
    behind, times = set(edges[len(roots) :]), Counter(own)
    return {at for at, edge in enumerate(own) if edge in behind or times[edge] > 1}


def leaves_of(roots: Sequence[Tensor], until: Collection[Node] = ()) -> list[Tensor]:
    """The leaves that autograd would reach from these tensors, not past certain nodes."""
    seen: set[Node | None] = {None, *until}
    leaves: list[Tensor] = []
    nodes: list[Any] = [root.grad_fn for root in roots]
    for node in nodes:  # which grow meanwhile
        if node in seen:
            continue
        seen.add(node)
        if type(node) is LEAF_NODE:
            leaves.append(node.variable)
        else:
            nodes += [behind for behind, _ in node.next_functions]
    return leaves


def failed_node(error: BaseException) -> int | None:
    """The sequence number of the autograd node that raised, if it is written in Python."""
    for frame, _ in walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node_number(node)
    return None
