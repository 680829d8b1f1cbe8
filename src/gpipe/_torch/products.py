"""Products with weights, as autograd's nodes have them: what they save, and torch's own formulas for the weights.

A node computes the gradients of its input and of its weights in one go. Where the weights' are to be computed later,
they must be computed as torch would have: the formulas here are those of its `derivatives.yaml`, for real numbers.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge


def _kinds(*names: str) -> list[type]:
    """Kinds of autograd's nodes, by name; what a torch does not have is done without."""
    return [kind for name in names if (kind := getattr(torch._C._functions, name, None)) is not None]


WEIGHT_SLOTS: dict[type, tuple[int, ...]] = {
    kind: slots
    for name, slots in {
        "AddmmBackward0": (2, 0),
        "MmBackward0": (1,),
        "BmmBackward0": (1,),
        "ConvolutionBackward0": (1, 2),
    }.items()
    for kind in _kinds(name)
}
"""The kinds of node that are products, and the places of their weight and of its bias among what they were given."""
LAYOUT_NODES: frozenset[type] = frozenset(
    _kinds(
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ExpandBackward0",
        "UnsqueezeBackward0",
        "SqueezeBackward1",
        "CloneBackward0",
        "ToCopyBackward0",
    )
)
"""The kinds of node that lay out or cast one tensor, and save none for it."""
LEAF_NODE: type = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
"""The kind of node that adds to the `.grad` of a leaf."""
PLAIN: frozenset[type] = frozenset({Tensor, nn.Parameter})
"""What is no subclass of a tensor with a life of its own."""


class Product(Protocol):
    """What a product saved of its input, for the gradients of its weights."""

    @property
    def x(self) -> Tensor:
        """What it was given."""

    def gradients(self, dy: Tensor, slots: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The gradients for the places that were asked for, from that of the product."""


@dataclass(frozen=True, slots=True)
class _MatrixProduct:
    """A product with a matrix, perhaps plus a bias; `sizes` and `strides` are the matrix's."""

    x: Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    bias_slot: int | None

    def gradients(self, dy: Tensor, slots: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Likewise; the bias's is that of the product, which autograd sums to the bias's shape."""
        return tuple(dy if slot == self.bias_slot else self._weight(dy) for slot in slots)

    def _weight(self, dy: Tensor) -> Tensor:
        by_columns = self.strides[0] == 1 and self.strides[1] == self.sizes[0]
        if by_columns and dy.layout is torch.strided:
            return dy.t().mm(self.x).t()
        return self.x.t().mm(dy)


@dataclass(frozen=True, slots=True)
class _BatchedProduct:
    """Matrices times matrices."""

    x: Tensor

    def gradients(self, dy: Tensor, slots: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Likewise."""
        return tuple(self.x.transpose(1, 2).bmm(dy) for _ in slots)


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution; `options` are those from the bias's sizes on."""

    x: Tensor
    weight: Tensor
    options: tuple[Any, ...]

    def gradients(self, dy: Tensor, slots: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Likewise, in one go: torch has kernels that compute both."""
        mask = [False, 1 in slots, 2 in slots]
        made = torch.ops.aten.convolution_backward(dy, self.x, self.weight, *self.options, mask)
        return tuple(made[slot] for slot in slots)


def read_product(node: Any) -> Product | None:
    """What a node of `WEIGHT_SLOTS` saved; None where the formulas here are not for it, or hooks are to unpack it.

    Hooks may unpack a tensor once and for its own node alone, as those of `torch.utils.checkpoint` do.
    """
    match type(node).__name__:
        case "AddmmBackward0" if node._saved_alpha == 1 and node._saved_beta == 1:
            return _read_matrix_product(node, "mat1", bias_slot=0)
        case "MmBackward0":
            return _read_matrix_product(node, "self", bias_slot=None)
        case "BmmBackward0":
            x = _plain(node, "self")
            return None if x is None else _BatchedProduct(x)
        case "ConvolutionBackward0":
            x, weight = _plain(node, "input"), _plain(node, "weight")
            return None if x is None or weight is None else _Convolution(x, weight, _convolution_options(node))
        case _:
            return None


def _read_matrix_product(node: Any, name: str, bias_slot: int | None) -> Product | None:
    x = _plain(node, name)
    if x is None:
        return None
    return _MatrixProduct(x, node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides, bias_slot)


def _convolution_options(node: Any) -> tuple[Any, ...]:
    return (
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )


def _plain(node: Any, name: str) -> Tensor | None:
    """A tensor that a node saved, out of its graph, if it is a plain one of real numbers that no hook unpacks."""
    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:
        return None
    saved = getattr(node, f"_saved_{name}")
    if type(saved) not in PLAIN or saved.layout is not torch.strided or saved.is_nested or saved.is_complex():
        return None
    return saved.detach()  # type: ignore[no-any-return]  # untyped in torch


def has_node_hooks(node: Node) -> bool:
    """Whether somebody put a hook behind a node, where what it computed is seen."""
    handle = node.register_hook(_see)
    try:
        return len(handle.hooks_dict_ref() or ()) > 1
    finally:
        handle.remove()


def _see(*seen: object) -> None:
    """A hook that does nothing."""
