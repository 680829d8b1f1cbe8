"""A backward in two parts: I computes the gradients of the inputs of a stage, W later the gradients of its weights.

W computes the gradient of each weight that the graph reaches once, as an operand of a product: `mm`, `addmm`, `bmm`,
a convolution. I runs every node, as a whole backward does, but in products it computes only the gradients of inputs.
For W it keeps the gradient that reached the product, and the input of the product. Everything else is computed in I:
norms, embeddings, autograd functions of users, weights that are used twice.

The results are bitwise identical to a whole backward, because
- nothing is computed by other formulas than torch's (`gpipe._torch.autograd`), nor on other values;
- a leaf that waits has one use in a graph, so there is no sum within one whose order could change;
- the sums over micro-batches are in their order: where a backward comes to a leaf for which the weights of an
  earlier one are still pending, these are done first.

Nothing is computed twice, and I frees the graph. The memory kept for a product is about the same as in its forward.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gpipe._torch.autograd import (
    LAYOUT_NODES,
    LEAF_NODE,
    OPERANDS,
    WEIGHT_SLOTS,
    Product,
    accumulate_gradients,
    has_gradient_hooks,
    has_node_hooks,
    memory_users,
    node_number,
    read_product,
)
from gpipe.runtime.actions import accumulate_all, backward
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.feature import Feature, Work
from gpipe.runtime.run import Rank, Run
from gpipe.schedule.action import Kind
from gpipe.stages.boundary import Gradients, known_roots
from gpipe.stages.memory_layout import copy_of, storage_address, version

CHANGED = (
    "what a product of this stage was given, or the gradient that came to it, was changed in place before the "
    "gradient of its weight was computed: by a layer that writes into a buffer or workspace which it hands on, in a "
    "later micro-batch, or by a hook that changes gradients in place. Return a clone instead, or use a schedule that "
    "does not split the backward"
)


class SplitBackward(Feature):
    """Runs backwards in two parts, on all ranks of this process."""

    def __init__(self) -> None:
        self.pending = defaultdict[int, dict[int, PendingWeights]](dict)  # by stage and micro-batch

    def perform_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work[Kind.BACKWARD] = self._backward
        work[Kind.BACKWARD_INPUT] = self._backward_input
        work[Kind.BACKWARD_WEIGHT] = self._backward_weight

    def _backward(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """B: after what earlier micro-batches have left."""

        def accumulate(roots: Sequence[Tensor], gradients: Gradients) -> Iterable[Tensor]:
            for earlier in self.pending[task.stage].values():
                backward_weight(earlier)
            return accumulate_all(roots, gradients)

        backward(run, rank, task, accumulate)

    def _backward_input(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """I: keeps the state of the micro-batch for its W."""
        state = rank.states[task.stage, task.micro_batch]
        pending = self.pending[task.stage]

        def accumulate(roots: Sequence[Tensor], gradients: Gradients) -> Iterable[Tensor]:
            leaves = [leaf for crossing in state.inputs for leaf in crossing.leaves]
            pending[task.micro_batch] = backward_input(roots, gradients, leaves, list(pending.values()))
            return pending[task.micro_batch].gradients

        if state.stage_run.is_sharded:
            self._backward(run, rank, task)
        else:
            backward(run, rank, task, accumulate)
        rank.states[task.stage, task.micro_batch] = state

    def _backward_weight(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """W: adds up the gradients of weights that waited."""
        state, pending = rank.states[task.stage, task.micro_batch], self.pending[task.stage]
        if task.micro_batch in pending:
            maker_of = partial(state.progress.maker_of, layers=state.stage_run.stage.layers)
            rank.scope.begin_backward(maker_of)
            try:
                backward_weight(pending[task.micro_batch])
            except BaseException:
                state.progress.found = maker_of(pending[task.micro_batch].next_node) or ""
                raise
            del pending[task.micro_batch]
        del rank.states[task.stage, task.micro_batch]


class WaitingProduct(NamedTuple):
    """A product whose weights can wait: where their gradients will go, and the leaves that these belong to."""

    node: Node
    product: Product
    slots: tuple[int, ...]
    ends: tuple[GradientEdge, ...]
    leaves: tuple[Node, ...]


class PendingProduct(NamedTuple):
    """A product whose weights wait, once the gradient came to it."""

    product: Product
    slots: tuple[int, ...]
    ends: tuple[GradientEdge, ...]
    number: int  # of its node
    dy: Tensor
    versions: tuple[int, int]  # of its input and of dy


@dataclass(slots=True)
class PendingWeights:
    """The products that one I left for its W, in the order in which autograd reached them, and their leaves."""

    products: deque[PendingProduct] = field(default_factory=deque)
    leaves: set[Node] = field(default_factory=set)

    @property
    def gradients(self) -> list[Tensor]:
        return [one.dy for one in self.products]

    @property
    def next_node(self) -> int | None:
        """The sequence number of the product that is computed, or would be next."""
        return self.products[0].number if self.products else None


def backward_input(
    roots: Sequence[Tensor],
    gradients: Gradients,
    boundary: Iterable[Tensor],
    pending: Collection[PendingWeights] = (),
) -> PendingWeights:
    """Runs I: adds to `.grad` of all leaves except those that can wait; returns the products for W.

    I is for the gradients of the `boundary`, leaves cut from other stages' graphs; `pending` is what earlier
    micro-batches left, in their order.
    """
    known, values = known_roots(roots, gradients)
    waiting, late, others = look_ahead(known, set(map(id, boundary)))
    _settle(others, pending)
    deferred = PendingWeights(leaves=late)
    if not waiting or others is None:
        if known:
            accumulate_gradients(known, values)
        return deferred
    handles = [one.node.register_prehook(partial(_keep, deferred, one)) for one in waiting]
    ends = [GradientEdge(node, 0) for node in (*others, *(one.node for one in waiting))]
    try:
        accumulate_gradients(known, values, ends)
    finally:
        for handle in handles:  # each holds its node, which holds it
            handle.remove()
    deferred.products = deque(map(_apart, deferred.products))
    return deferred


def _keep(deferred: PendingWeights, one: WaitingProduct, came: tuple[Tensor | None, ...]) -> None:
    if (dy := came[0]) is not None:
        versions = version(one.product.x), version(dy)
        number = node_number(one.node)
        deferred.products.append(PendingProduct(one.product, one.slots, one.ends, number, dy, versions))


def _apart(one: PendingProduct) -> PendingProduct:
    """The product with a gradient to which nobody adds: a leaf's `.grad` may have become a view of it."""
    if not storage_address(one.dy) or memory_users(one.dy) <= 1:
        return one
    dy = copy_of(one.dy)
    return one._replace(dy=dy, versions=(one.versions[0], version(dy)))


def _settle(others: Collection[Node] | None, pending: Iterable[PendingWeights]) -> None:
    """Does what earlier micro-batches left for leaves that are about to be reached."""
    late = [at for at, one in enumerate(pending) if others is None or not one.leaves.isdisjoint(others)]
    if late:
        for one in list(pending)[: late[-1] + 1]:
            backward_weight(one)


@torch.no_grad()
def backward_weight(deferred: PendingWeights) -> None:
    """Runs W: adds to `.grad` of the leaves that waited, and frees product after product."""
    while deferred.products:
        product, slots, ends, _, dy, versions = deferred.products[0]
        if versions != (version(product.x), version(dy)):
            raise RuntimeError(CHANGED)
        accumulate_gradients(ends, product.gradients(dy, slots))
        deferred.products.popleft()  # not before: it says which node failed
    deferred.leaves.clear()


def look_ahead(
    roots: Iterable[Tensor], boundary: Collection[int]
) -> tuple[list[WaitingProduct], set[Node], list[Node] | None]:
    """Walks the graph behind the roots once: the products whose weights can wait, their leaves, and all others.

    `boundary` are the ids of leaves. The last is None where nodes of the graph must know of no such distinction.
    """
    seen: set[Node] = set()
    again: set[Node] = set()  # come to by several edges
    products, leaves = [], []
    todo = [get_gradient_edge(root).node for root in roots]
    while todo:
        node = todo.pop()
        if node in seen:
            again.add(node)
            continue
        seen.add(node)
        kind = type(node)
        if kind is LEAF_NODE:
            leaves.append(node)
            continue
        if kind in WEIGHT_SLOTS:
            products.append(node)
        elif kind.__name__ == REENTRANT:
            return [], set(), None
        todo += [behind for behind, _ in node.next_functions if behind is not None]
    singles = {leaf for leaf in leaves if leaf not in again and _can_wait(leaf, boundary)}
    found = [_find_waiting(node, singles, again) for node in products]
    waiting = [one for one in found if one is not None]
    late = {leaf for one in waiting for leaf in one.leaves}
    return waiting, late, [leaf for leaf in leaves if leaf not in late]


REENTRANT = "CheckpointFunctionBackward"
"""A checkpoint that runs a backward of its own, which comes to leaves unseen, and refuses one for some leaves."""


def _can_wait(node: Node, boundary: Collection[int]) -> bool:
    leaf: Tensor = node.variable  # type: ignore[attr-defined]  # of a node of a leaf
    is_plain = type(leaf) in OPERANDS and leaf.layout is torch.strided
    return is_plain and id(leaf) not in boundary and not has_gradient_hooks(leaf)


def _find_waiting(node: Node, singles: Set[Node], again: Collection[Node]) -> WaitingProduct | None:
    """A product whose weights can wait: it computes the gradients of all of them, or of none."""
    edges = node.next_functions
    weight, *bias = WEIGHT_SLOTS[type(node)]
    slots, ends, leaves = [], [], []
    for slot in (weight, *bias):
        behind, number = edges[slot]
        if behind is None:
            if slot == weight:
                return None
            continue
        leaf = _leaf_behind(behind, again)
        if leaf not in singles:
            return None
        slots.append(slot)
        ends.append(GradientEdge(behind, number))
        leaves.append(leaf)
    if has_node_hooks(node) or (product := read_product(node)) is None:
        return None
    return WaitingProduct(node, product, tuple(slots), tuple(ends), tuple(leaves))


def _leaf_behind(node: Node, again: Collection[Node]) -> Node:
    """Where a way through nodes that lay out or cast, and are come to by it alone, begins or ends."""
    while type(node) in LAYOUT_NODES and node not in again:
        behind = node.next_functions[0][0]
        assert behind is not None  # it is there because something behind it wants a gradient
        node = behind
    return node
