"""Splits backward passes: I computes the gradients of a stage's inputs, and later W the weight gradients.

W computes the gradients of weights that the graph reaches exactly once, as an operand of a product (`mm`, `addmm`,
`bmm` or a convolution). I runs every node, like a whole backward pass, but in these products it computes only the
gradients of inputs. For W, it keeps the gradient that reached the product, and the input of the product. I also
computes all other gradients: of norms, embeddings, custom autograd functions, and weights that are used twice.

The results are bitwise identical to a whole backward pass, because

- W uses the formulas of torch (`gpipe._torch.autograd`) on the same values,
- a deferred weight has only one use in a graph, so the graph does not sum several gradients of it,
- gradients are accumulated in the order of micro-batches, because pending gradients of earlier micro-batches are
  computed before a backward pass reaches the weight.

Nothing is computed twice, and I frees the graph. Between I and W, a product keeps about as much memory as between its
forward and its backward.
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
    "schedule: the input of a product, or its gradient, was changed in place before W used it. Return a clone from "
    "the layer or hook, or use a schedule without split backward passes. [changed-before-weight-gradient]"
)


class SplitBackward(Feature):
    """Splits backward passes on all ranks of this process."""

    def __init__(self) -> None:
        self.pending = defaultdict[int, dict[int, PendingWeights]](dict)  # by stage and micro-batch

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work[Kind.BACKWARD] = self._backward
        work[Kind.BACKWARD_INPUT] = self._backward_input
        work[Kind.BACKWARD_WEIGHT] = self._backward_weight

    def _backward(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """B: computes pending gradients of earlier micro-batches, then runs the whole backward pass."""

        def accumulate(roots: Sequence[Tensor], gradients: Gradients) -> Iterable[Tensor]:
            for earlier in self.pending[task.stage].values():
                backward_weight(earlier)
            return accumulate_all(roots, gradients)

        backward(run, rank, task, accumulate)

    def _backward_input(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """I: computes the gradients of inputs, and keeps the state of the micro-batch for W."""
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
        """W: computes and accumulates the deferred gradients of weights."""
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
    """A matrix product or convolution whose weight gradients can be deferred.

    Attributes:
        node: The autograd node of the product.
        slots: The inputs of the node that are weights.
        ends: For each slot, the edge that receives the gradient.
        leaves: For each slot, the node that accumulates the gradient of the weight.
    """

    node: Node
    product: Product
    slots: tuple[int, ...]
    ends: tuple[GradientEdge, ...]
    leaves: tuple[Node, ...]


class PendingProduct(NamedTuple):
    """A product whose weight gradients are deferred, after the gradient `dy` of the product has been computed.

    Attributes:
        number: The sequence number of the node of the product.
        versions: The version counters of the product's input and of `dy`.
    """

    product: Product
    slots: tuple[int, ...]
    ends: tuple[GradientEdge, ...]
    number: int
    dy: Tensor
    versions: tuple[int, int]


@dataclass(slots=True)
class PendingWeights:
    """The products that I has deferred for one micro-batch, in order, and the leaf nodes of their weights."""

    products: deque[PendingProduct] = field(default_factory=deque)
    leaves: set[Node] = field(default_factory=set)

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that are kept for the products."""
        return [product.dy for product in self.products]

    @property
    def next_node(self) -> int | None:
        """The sequence number of the current or next product, or None after the last product."""
        return self.products[0].number if self.products else None


def backward_input(
    roots: Sequence[Tensor],
    gradients: Gradients,
    boundary: Iterable[Tensor],
    pending: Collection[PendingWeights] = (),
) -> PendingWeights:
    """Runs I: accumulates gradients in `.grad` of all leaf tensors, except weights whose gradients can be deferred.

    Args:
        roots: The tensors at which the backward pass starts.
        gradients: The gradients of the roots.
        boundary: The leaf tensors at the boundary to earlier stages. Their gradients are computed now.
        pending: The deferred products of earlier micro-batches, in order.

    Returns:
        The deferred products, for `backward_weight`.
    """
    known, values = known_roots(roots, gradients)
    waiting, deferred_leaves, others = look_ahead(known, set(map(id, boundary)))
    _finish_earlier(others, pending)
    deferred = PendingWeights(leaves=deferred_leaves)
    if not waiting or others is None:
        if known:
            accumulate_gradients(known, values)
        return deferred
    handles = [product.node.register_prehook(partial(_keep, deferred, product)) for product in waiting]
    ends = [GradientEdge(node, 0) for node in (*others, *(product.node for product in waiting))]
    try:
        accumulate_gradients(known, values, ends)
    finally:
        for handle in handles:  # A handle and its node refer to each other.
            handle.remove()
    deferred.products = deque(map(_with_own_gradient, deferred.products))
    return deferred


def _keep(deferred: PendingWeights, waiting: WaitingProduct, gradients: tuple[Tensor | None, ...]) -> None:
    if (dy := gradients[0]) is not None:
        versions = version(waiting.product.x), version(dy)
        number = node_number(waiting.node)
        deferred.products.append(PendingProduct(waiting.product, waiting.slots, waiting.ends, number, dy, versions))


def _with_own_gradient(product: PendingProduct) -> PendingProduct:
    """Copies the gradient of a product if it shares memory, because the `.grad` of a leaf may be a view of it."""
    if not storage_address(product.dy) or memory_users(product.dy) <= 1:
        return product
    dy = copy_of(product.dy)
    return product._replace(dy=dy, versions=(product.versions[0], version(dy)))


def _finish_earlier(others: Collection[Node] | None, pending: Iterable[PendingWeights]) -> None:
    """Computes pending gradients of earlier micro-batches, up to the last micro-batch with a leaf in `others`."""
    earlier = list(pending)
    needed = [i for i, weights in enumerate(earlier) if others is None or not weights.leaves.isdisjoint(others)]
    for weights in earlier[: needed[-1] + 1] if needed else ():
        backward_weight(weights)


@torch.no_grad()
def backward_weight(deferred: PendingWeights) -> None:
    """Runs W: accumulates the deferred gradients in `.grad` of the weights, and frees each product."""
    while deferred.products:
        product, slots, ends, _, dy, versions = deferred.products[0]
        if versions != (version(product.x), version(dy)):
            raise RuntimeError(CHANGED)
        accumulate_gradients(ends, product.gradients(dy, slots))
        deferred.products.popleft()  # Only now: `next_node` must name the product if it fails.
    deferred.leaves.clear()


def look_ahead(
    roots: Iterable[Tensor], boundary: Collection[int]
) -> tuple[list[WaitingProduct], set[Node], list[Node] | None]:
    """Searches the graph from the roots, and finds the products whose weight gradients can be deferred.

    Args:
        roots: The tensors at which the backward pass starts.
        boundary: Ids of leaf tensors at the boundary to earlier stages.

    Returns:
        The products, the leaf nodes of their weights, and all other leaf nodes. If the graph has reentrant
        checkpoints, no product can be deferred, and the third result is None.
    """
    seen: set[Node] = set()
    shared: set[Node] = set()  # nodes with several incoming edges
    products, leaves = [], []
    todo = [get_gradient_edge(root).node for root in roots]
    while todo:
        node = todo.pop()
        if node in seen:
            shared.add(node)
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
        todo += [next_node for next_node, _ in node.next_functions if next_node is not None]
    singles = {leaf for leaf in leaves if leaf not in shared and _can_wait(leaf, boundary)}
    waiting = [w for w in (_find_waiting(node, singles, shared) for node in products) if w is not None]
    deferred = {leaf for product in waiting for leaf in product.leaves}
    return waiting, deferred, [leaf for leaf in leaves if leaf not in deferred]


REENTRANT = "CheckpointFunctionBackward"
"""The name of the node of a reentrant checkpoint. Its nested backward reaches leaves that the graph does not show."""


def _can_wait(node: Node, boundary: Collection[int]) -> bool:
    leaf: Tensor = node.variable  # type: ignore[attr-defined]  # It is the node of a leaf.
    is_plain = type(leaf) in OPERANDS and leaf.layout is torch.strided
    return is_plain and id(leaf) not in boundary and not has_gradient_hooks(leaf)


def _find_waiting(node: Node, singles: Set[Node], shared: Collection[Node]) -> WaitingProduct | None:
    """Returns the product of a node if the gradients of all its weights can be deferred."""
    edges = node.next_functions
    weight, *bias = WEIGHT_SLOTS[type(node)]
    slots, ends, leaves = [], [], []
    for slot in (weight, *bias):
        next_node, number = edges[slot]
        if next_node is None:
            if slot == weight:
                return None
            continue
        leaf = _leaf_of(next_node, shared)
        if leaf not in singles:
            return None
        slots.append(slot)
        ends.append(GradientEdge(next_node, number))
        leaves.append(leaf)
    if has_node_hooks(node) or (product := read_product(node)) is None:
        return None
    return WaitingProduct(node, product, tuple(slots), tuple(ends), tuple(leaves))


def _leaf_of(node: Node, shared: Collection[Node]) -> Node:
    """Skips nodes that only change the layout or dtype, such as transposes. Returns the first other node."""
    while type(node) in LAYOUT_NODES and node not in shared:
        next_node = node.next_functions[0][0]
        assert next_node is not None  # The node exists only because its input requires a gradient.
        node = next_node
    return node
