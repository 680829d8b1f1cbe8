"""What autograd's engine, nodes and tensors do not say in public.

Products with weights, as nodes have them: a node computes the gradients of its input and of its weights in one go.
Where the weights' are to be computed later, they must be computed as torch would have: the formulas here are those of
its `derivatives.yaml`, for real numbers.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_run_backward: Callable[..., object] = torch.autograd.Variable._execution_engine.run_backward


def accumulate_gradients(
    roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor], ends: Sequence[GradientEdge] = ()
) -> None:
    """Adds to `.grad` of all leaves, or at the `ends`; `torch.autograd.backward` takes 29 us more to check."""
    _run_backward(
        tuple(roots),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        tuple(ends),  # inputs: it runs their nodes and those on the way, and computes nothing for others
        allow_unreachable=True,
        accumulate_grad=True,
    )


will_run: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""Whether the backward that is under way comes to a node: not if it is for some inputs alone."""
running_node: Callable[[], Any] = torch._C._current_autograd_node  # the node whose backward this thread runs, or None


def node_number(node: Any) -> int:
    """How many nodes this thread had made when it made a node: which layer did follows from it."""
    return int(node._sequence_nr())


next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of this thread will have."""


def gradient_hooks_of(tensor: Tensor) -> list[Any]:
    """The dicts of hooks that see the gradient of a tensor, or that it has been accumulated."""
    return [getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether somebody put a hook on a tensor."""
    return bool(tensor._backward_hooks)


def has_hooks(tensor: Tensor) -> bool:
    """Whether somebody put a hook on a tensor, or on what accumulates its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def is_differentiated_forward() -> bool:
    """Whether this thread is within `torch.autograd.forward_ad.dual_level()`, so that tensors may have tangents."""
    return forward_ad._current_level >= 0


copy_each: Callable[[list[Tensor], tuple[Tensor, ...]], object] = torch._foreach_copy_
"""Copies tensors into others all at once; `Tensor.copy_` does one."""
negative_view: Callable[[Tensor], Tensor] = torch._neg_view
"""A view with the other sign, as `torch.conj(x).imag` is one."""


def memory_users(tensor: Tensor) -> int:
    """How many tensors there are of the memory of one, but for that which it is a view of and keeps alive."""
    users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # one is the storage's own, in Python
    return users - tensor._is_view()


def is_held(tensors: Sequence[Any], at: int) -> bool:
    """Whether code in Python refers to a tensor, beside a list, or to that which it is a view of."""
    known = sys.getrefcount(tensors[at]) > _LISTED
    return known or (tensors[at]._is_view() and sys.getrefcount(tensors[at]._base) > _BASE)


_fresh = [torch.empty(2)[1:]]
_LISTED, _BASE = sys.getrefcount(_fresh[0]), sys.getrefcount(_fresh[0]._base)  # what counts where nobody else does
_nodes: Any = torch._C._functions
WEIGHT_SLOTS: dict[type, tuple[int, ...]] = {
    _nodes.AddmmBackward0: (2, 0),
    _nodes.MmBackward0: (1,),
    _nodes.BmmBackward0: (1,),
    _nodes.ConvolutionBackward0: (1, 2),
}
"""The kinds of node that are products, and the places of their weight and of its bias among what they were given."""
LAYOUT_NODES: frozenset[type] = frozenset({
    _nodes.TBackward0, _nodes.TransposeBackward0, _nodes.PermuteBackward0, _nodes.ViewBackward0,
    _nodes.UnsafeViewBackward0, _nodes.ExpandBackward0, _nodes.UnsqueezeBackward0, _nodes.SqueezeBackward1,
    _nodes.CloneBackward0, _nodes.ToCopyBackward0,
})  # fmt: skip
"""The kinds of node that lay out or cast one tensor, and save none for it."""
LEAF_NODE: type[Any] = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
"""The kind of node that adds to the `.grad` of a leaf."""
PLAIN: frozenset[type] = frozenset({Tensor, nn.Parameter})  # what is no subclass of a tensor with a life of its own
OPERANDS = PLAIN | {FakeTensor}  # what a product may have saved: for its bytes to be counted, also what has no values


@dataclass(frozen=True, slots=True)
class Product:
    """What a product saved, for the gradients of its weights."""

    x: Tensor  # what it was given
    gradients: Callable[[Tensor, tuple[int, ...]], tuple[Tensor, ...]]  # for some places, from that of the product


def read_product(node: Any) -> Product | None:
    """What a node of `WEIGHT_SLOTS` saved; None where the formulas are not for it, or others' hooks unpack it.

    Hooks may unpack a tensor once and for its own node alone, as those of `torch.utils.checkpoint` do.
    """
    match type(node).__name__:
        case "AddmmBackward0" if node._saved_alpha == 1 and node._saved_beta == 1:
            return _read_matrix_product(node, "mat1", bias_slot=0)
        case "MmBackward0":
            return _read_matrix_product(node, "self", bias_slot=None)
        case "BmmBackward0":
            if (batch := _plain(node, "self")) is not None:
                return Product(batch, lambda dy, slots: tuple(batch.transpose(1, 2).bmm(dy) for _ in slots))
        case "ConvolutionBackward0":
            x, weight = _plain(node, "input"), _plain(node, "weight")
            if x is not None and weight is not None:
                names = "bias_sym_sizes_opt stride padding dilation transposed output_padding groups"
                options = [getattr(node, f"_saved_{name}") for name in names.split()]
                return Product(x, partial(_of_convolution, x, weight, options))
    return None


def _read_matrix_product(node: Any, name: str, bias_slot: int | None) -> Product | None:
    """With a matrix, perhaps plus a bias: of that the gradient is the product's, which autograd sums to its shape."""
    x, sizes, strides = _plain(node, name), node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    if x is None:
        return None
    by_columns = strides[0] == 1 and strides[1] == sizes[0]

    def gradients(dy: Tensor, slots: tuple[int, ...]) -> tuple[Tensor, ...]:
        columns = by_columns and dy.layout is torch.strided
        return tuple(dy if slot == bias_slot else dy.t().mm(x).t() if columns else x.t().mm(dy) for slot in slots)

    return Product(x, gradients)


def _of_convolution(
    x: Tensor, weight: Tensor, options: list[Any], dy: Tensor, slots: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """In one go: torch has kernels that compute both."""
    made = torch.ops.aten.convolution_backward(dy, x, weight, *options, [False, 1 in slots, 2 in slots])
    return tuple(made[slot] for slot in slots)


def _plain(node: Any, name: str) -> Tensor | None:
    """A tensor that a node saved, out of its graph, if it is a plain one of real numbers that no hook unpacks."""
    if getattr(node, f"_raw_saved_{name}").unpack_hook not in (None, unpack):
        return None
    saved = getattr(node, f"_saved_{name}")
    if type(saved) not in OPERANDS or saved.layout is not torch.strided or saved.is_nested or saved.is_complex():
        return None
    return saved.detach()  # type: ignore[no-any-return]  # untyped in torch


@dataclass(slots=True, eq=False)
class SavedTensor:
    """A tensor that a node saved, out of its graph, and how often it had been changed in place by then."""

    tensor: Tensor  # while it is away, an empty one
    version: int
    away: tuple[Any, torch.Size, tuple[int, ...]] | None = None  # how it lay in the storage that is away

    @classmethod
    def of(cls, tensor: Tensor) -> "SavedTensor":
        """What a hook is to give for what a node saves, with what was put on it as attributes."""
        own = tensor.detach()
        vars(own).update(vars(tensor) | vars(own))
        return cls(own, tensor._version)

    @property
    def is_as_saved(self) -> bool:
        """Whether its storage has its very numbers: it was not changed since, and is no view with other signs."""
        return self.tensor._version == self.version and not (self.tensor.is_conj() or self.tensor.is_neg())

    @property
    def address(self) -> int:
        """Where its storage is, if it is dense memory that can be had; else 0."""
        tensor = self.tensor
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return 0
        try:
            return tensor.untyped_storage().data_ptr()
        except RuntimeError:  # of a level of torch.func or forward mode that has ended
            return 0

    def let_go(self) -> None:
        tensor = self.tensor
        self.away = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.tensor = tensor.new_empty(0)

    def lay_in(self, storage: torch.UntypedStorage) -> None:
        """Takes a storage in which it lies as it did."""
        assert self.away is not None
        self.tensor.set_(storage, *self.away)
        self.version, self.away = self.tensor._version, None


WITH_THE_HOST = "a backward of another stage or micro-batch needs tensors that have been offloaded to the host"


def unpack(saved: SavedTensor) -> Tensor:
    """What a hook is to give a node for what it saved; where there is a hook, torch looks for no changes itself."""
    tensor = saved.tensor
    if saved.away is not None:
        raise RuntimeError(WITH_THE_HOST)
    if tensor._version != saved.version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version "
            f"{saved.version} instead"
        )
    return tensor


def has_node_hooks(node: Node) -> bool:
    """Whether somebody put a hook behind a node, where what it computed is seen."""
    handle = node.register_hook(lambda made, came: None)
    try:
        return len(handle.hooks_dict_ref() or ()) > 1
    finally:
        handle.remove()
