"""A call of the pipe under grad: one autograd node whose forward and backward are pipelined.

The graph is cut at stage boundaries, so the node's backward can hand each stage's part to its rank's thread. What a
forward leaves for its backward hangs on the node: several forwards may precede their backwards, and an output that
is dropped takes everything with it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpipe._torch.autograd import will_run
from gpipe.errors import entrance
from gpipe.runtime.state import Output
from gpipe.stages.boundary import Gradients
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

CREATE_GRAPH = (
    "create_graph=True: the backward of a pipeline cannot be differentiated again, because its graph is cut at stage "
    "boundaries; use the plain layers for higher derivatives"
)
ONLY_SOME = (
    "torch.autograd.grad and backward(inputs=...) through a pipeline would add to .grad of every parameter as well; "
    "call backward() and read .grad"
)


class Call(Protocol):
    """One forward, and its backward if that ever comes."""

    def forward(self) -> list[Output]:
        """Runs all forwards; gives the outputs of all micro-batches."""

    def backward(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Runs all backwards; gives the gradients of the inputs' leaves, micro-batch after micro-batch."""


def pipelined(call: Call, leaves: Sequence[Sequence[Tensor]]) -> list[Tree]:
    """Runs a call's forward as one autograd node; gives the output of each micro-batch.

    `leaves` are the tensors that each micro-batch's leaves were cut from. Autograd adds up what comes back to one
    tensor in the order of the node's inputs: that of the micro-batches.
    """
    inputs = [leaf for found in leaves for leaf in found]
    anchor = torch.empty(0, requires_grad=True)  # makes autograd keep the node though no parameter is its input
    outputs: list[Output] = []
    tensors = iter(_Pipelined.apply(call, outputs, anchor, *inputs))  # type: ignore[no-untyped-call]  # untyped in torch
    return [replace_tensors(output.value, lambda _: next(tensors)) for output in outputs]


class _Pipelined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, outputs: list[Output], anchor: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        outputs += call.forward()
        tensors = [tensor for output in outputs for tensor in tensors_in(output.value)]
        wants = [want for output in outputs for want in output.wants_gradient]
        ctx.call = call
        ctx.anchor = get_gradient_edge(anchor).node
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t, wanted in zip(tensors, wants, strict=True) if not wanted))
        return tuple(tensors)

    @staticmethod
    @entrance
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(CREATE_GRAPH)
        if not will_run(ctx.anchor):
            raise RuntimeError(ONLY_SOME)
        return (None, None, None, *ctx.call.backward(gradients))
