"""What autograd's engine, nodes and tensors do not say in public."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node


def accumulate_gradients(
    roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor], ends: Sequence[GradientEdge] = ()
) -> None:
    """Adds to `.grad` of all leaves; `torch.autograd.backward` does so too, and takes 29 us more to check.

    Where `ends` are given, it runs their nodes and those on the way, and computes nothing for others.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        tuple(ends),  # inputs; none: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


will_run: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""Whether the backward that is under way comes to a node: not if it is for some inputs alone."""
running_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node whose backward this thread runs, or None."""


def node_number(node: Any) -> int:
    """How many nodes this thread had made when it made a node: which layer did follows from it."""
    return int(node._sequence_nr())


next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of this thread will have."""


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
