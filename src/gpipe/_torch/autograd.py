"""Wraps internals of autograd's engine, nodes and tensors.

The autograd node of a matrix product or convolution computes the gradients of its input and weight together. If gpipe
defers the weight gradient, it must compute this gradient exactly as torch does. The formulas in this module come from
torch's `derivatives.yaml`, for real numbers.
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
    """Adds gradients to `.grad` of all leaves, or only at `ends`.

    `torch.autograd.backward` would do the same, but its checks take 29 us per call.
    """
    _run_backward(
        tuple(roots),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        tuple(ends),  # inputs: restricts the backward pass to the nodes that lead to them
        allow_unreachable=True,
        accumulate_grad=True,
    )


will_run: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""Whether the running backward pass will execute a node. With `inputs=`, a backward pass skips some nodes."""
running_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the node whose backward is running in this thread, or None."""


def node_number(node: Any) -> int:
    """Returns the number of nodes that this thread created before this node. The number identifies its layer."""
    return int(node._sequence_nr())


next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the number that the next node of this thread will have."""


def gradient_hooks_of(tensor: Tensor) -> list[Any]:
    """Returns the dicts of a tensor's hooks: on its gradient, and on the accumulation of its gradient."""
    return [getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has a hook on its gradient."""
    return bool(tensor._backward_hooks)


def has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has a hook on its gradient, or on the accumulation of its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def is_differentiated_forward() -> bool:
    """Whether this thread is inside `torch.autograd.forward_ad.dual_level()`, so that tensors may have tangents."""
    return forward_ad._current_level >= 0


copy_each: Callable[[list[Tensor], tuple[Tensor, ...]], object] = torch._foreach_copy_
"""Copies each tensor of a list into a tensor of another list, in one call. `Tensor.copy_` copies one tensor."""
negative_view: Callable[[Tensor], Tensor] = torch._neg_view
"""Returns a view with the opposite sign, such as the view that `torch.conj(x).imag` creates."""


def memory_users(tensor: Tensor) -> int:
    """Returns the number of tensors that share a tensor's memory. The base of a view does not count."""
    users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # without the Python storage object
    return users - tensor._is_view()


def is_held(tensors: Sequence[Any], index: int) -> bool:
    """Whether a reference to `tensors[index]`, or to its base if it is a view, exists outside of the list."""
    is_referenced = sys.getrefcount(tensors[index]) > _LISTED
    return is_referenced or (tensors[index]._is_view() and sys.getrefcount(tensors[index]._base) > _BASE)


_fresh = [torch.empty(2)[1:]]
_LISTED, _BASE = sys.getrefcount(_fresh[0]), sys.getrefcount(_fresh[0]._base)  # counts without other references
_nodes: Any = torch._C._functions
WEIGHT_SLOTS: dict[type, tuple[int, ...]] = {
    _nodes.AddmmBackward0: (2, 0),
    _nodes.MmBackward0: (1,),
    _nodes.BmmBackward0: (1,),
    _nodes.ConvolutionBackward0: (1, 2),
}
"""The node types of products with weights, with the argument positions of the weight and the bias."""
LAYOUT_NODES: frozenset[type] = frozenset({
    _nodes.TBackward0, _nodes.TransposeBackward0, _nodes.PermuteBackward0, _nodes.ViewBackward0,
    _nodes.UnsafeViewBackward0, _nodes.ExpandBackward0, _nodes.UnsqueezeBackward0, _nodes.SqueezeBackward1,
    _nodes.CloneBackward0, _nodes.ToCopyBackward0,
})  # fmt: skip
"""The node types that only change the layout or dtype of one tensor, and do not save a tensor."""
LEAF_NODE: type[Any] = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
"""The node type that accumulates into the `.grad` of a leaf."""
PLAIN: frozenset[type] = frozenset({Tensor, nn.Parameter})  # without other subclasses
OPERANDS = PLAIN | {FakeTensor}  # fake tensors too, so that their bytes can be counted


@dataclass(frozen=True, slots=True)
class Product:
    """A product whose weight gradients can be computed later.

    Attributes:
        x: The input that the node has saved.
        gradients: A function that computes the gradients of the arguments at some positions, from the gradient of the
            product.
    """

    x: Tensor
    gradients: Callable[[Tensor, tuple[int, ...]], tuple[Tensor, ...]]


def read_product(node: Any) -> Product | None:
    """Reads the product of a node whose type is in `WEIGHT_SLOTS`.

    Returns None if the formulas do not apply, or if saved-tensor hooks of other code would have to unpack the input.
    Some hooks, such as the hooks of `torch.utils.checkpoint`, can unpack a tensor only once, and only for its own
    node.
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
                return Product(x, partial(_convolution_gradients, x, weight, options))
    return None


def _read_matrix_product(node: Any, name: str, bias_slot: int | None) -> Product | None:
    """Reads a matrix product. Autograd sums the product's gradient to the shape of the bias."""
    x, sizes, strides = _plain(node, name), node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    if x is None:
        return None
    by_columns = strides[0] == 1 and strides[1] == sizes[0]

    def gradients(dy: Tensor, slots: tuple[int, ...]) -> tuple[Tensor, ...]:
        columns = by_columns and dy.layout is torch.strided
        return tuple(dy if slot == bias_slot else dy.t().mm(x).t() if columns else x.t().mm(dy) for slot in slots)

    return Product(x, gradients)


def _convolution_gradients(
    x: Tensor, weight: Tensor, options: list[Any], dy: Tensor, slots: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Computes the gradients of weight and bias in one call, because torch has kernels that compute both."""
    gradients = torch.ops.aten.convolution_backward(dy, x, weight, *options, [False, 1 in slots, 2 in slots])
    return tuple(gradients[slot] for slot in slots)


def _plain(node: Any, name: str) -> Tensor | None:
    """Returns a saved tensor without its graph.

    Returns None for subclasses and complex numbers, and if saved-tensor hooks of other code would unpack it.
    """
    if getattr(node, f"_raw_saved_{name}").unpack_hook not in (None, unpack):
        return None
    saved = getattr(node, f"_saved_{name}")
    if type(saved) not in OPERANDS or saved.layout is not torch.strided or saved.is_nested or saved.is_complex():
        return None
    return saved.detach()  # type: ignore[no-any-return]  # untyped in torch


@dataclass(slots=True, eq=False)
class SavedTensor:
    """A tensor that a node saved, without its graph, or the input of a stage.

    Attributes:
        tensor: The tensor. Empty while its storage is offloaded.
        version: The version of the tensor when it was saved.
        away: The storage offset, shape and strides of the tensor while its storage is offloaded, otherwise None.
    """

    tensor: Tensor
    version: int
    away: tuple[Any, torch.Size, tuple[int, ...]] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> "SavedTensor":
        """Packs a tensor that a node saves. Keeps attributes that were set on the tensor."""
        detached = tensor.detach()
        vars(detached).update(vars(tensor) | vars(detached))
        return cls(detached, tensor._version)

    @property
    def is_as_saved(self) -> bool:
        """Whether the storage has the saved values: the tensor is unchanged, and not a conjugate or negative view."""
        return self.tensor._version == self.version and not (self.tensor.is_conj() or self.tensor.is_neg())

    @property
    def address(self) -> int:
        """The address of the tensor's storage, or 0 if the tensor is not plain and strided."""
        tensor = self.tensor
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return 0
        try:
            return tensor.untyped_storage().data_ptr()
        except RuntimeError:  # from a level of torch.func or forward mode that has ended
            return 0

    def release_storage(self) -> None:
        tensor = self.tensor
        self.away = tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor.data = tensor.new_empty(0)  # the same object with the same version, because a stage may keep it

    def restore_storage(self, storage: torch.UntypedStorage) -> None:
        """Restores the tensor in a storage, with its offset, shape and strides."""
        assert self.away is not None
        self.tensor.data = self.tensor.new_empty(0).set_(storage, *self.away)
        self.away = None


OFFLOADED = "A backward pass of a different stage or micro-batch needs activations that are offloaded to host memory."


def unpack(saved: SavedTensor) -> Tensor:
    """Returns the tensor that a node saved. Checks that the tensor is unchanged, because torch does not."""
    tensor = saved.tensor
    if saved.away is not None:
        raise RuntimeError(OFFLOADED)
    if tensor._version != saved.version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version "
            f"{saved.version} instead"
        )
    return tensor


def has_node_hooks(node: Node) -> bool:
    """Whether a node has hooks on the gradients that it returns."""
    handle = node.register_hook(lambda made, came: None)
    try:
        return len(handle.hooks_dict_ref() or ()) > 1
    finally:
        handle.remove()
