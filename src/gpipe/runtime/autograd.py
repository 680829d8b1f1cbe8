"""A call of the pipe under grad: one autograd node whose forward and backward are pipelined.

The graph is cut at stage boundaries, so the node's backward can hand each stage's part to its rank's thread. What a
forward leaves for its backward hangs on the node: several forwards may precede their backwards, and an output that
is dropped takes everything with it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpipe._torch.autograd import will_run
from gpipe.errors import entrance
from gpipe.runtime.context import Request
from gpipe.runtime.passes import run_backward, run_forward
from gpipe.runtime.run import Output, Run
from gpipe.stages.boundary import UNDEFINED, Gradients
from gpipe.stages.layout import moved
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

CREATE_GRAPH = (
    "create_graph=True: the backward of a pipeline cannot be differentiated again, because its graph is cut at stage "
    "boundaries; use the plain layers for higher derivatives"
)
ONLY_SOME = (
    "torch.autograd.grad and backward(inputs=...) through a pipeline would add to .grad of every parameter as well; "
    "call backward() and read .grad"
)


SECOND_BACKWARD = (
    "this forward's backward has run already, and the pipeline has let go of what it kept; "
    "call the pipe again, or add the losses up and call backward once"
)


class Call:
    """One forward of all processes, and its backward whenever that comes."""

    def __init__(self, run: Run, inputs: Sequence[Tensor]) -> None:
        self._run: Run | None = run  # until its backward
        self._shapes = [list(tensor.shape) for tensor in inputs]
        self._devices = [tensor.device for tensor in inputs]
        self._context, self._notes = run.context, run.recorder is not None
        self._wants: list[tuple[bool, ...]] = []

    def forward(self) -> list[Output]:
        """Runs all forwards; gives the outputs of all micro-batches, in every process."""
        run = self._run
        assert run is not None
        run_forward(run)
        outputs = run.context.gather_outputs(run.take_outputs(), len(run.rows))
        self._wants = [output.wants_gradient for output in outputs]
        self._wanted = run.context.finish(run, self._shapes)
        run.context.check_inputs(self._wanted)
        return outputs

    def backward(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Runs all backwards; gives the gradients of the inputs' leaves, micro-batch after micro-batch.

        Over processes the gradients of the output count that the one with the last stage has, and those of the
        inputs come to all whose inputs have a graph.
        """
        with self._context.entered(notes=self._notes):
            run, self._run = self._run, None
            if run is None:
                raise RuntimeError(SECOND_BACKWARD)
            run.context.agree(run, Request.BACKWARD)
            run.output_gradients = self._parted(gradients)
            run_backward(run)
            run.tell(run.findings)
            found = [gradient for m in range(len(run.inputs)) for gradient in run.input_gradients[m]]
            found = run.context.share_input_gradients(found, self._wanted)
            run.context.finish(run)
        return [
            moved(gradient, device) if isinstance(gradient, Tensor) else None
            for device, gradient in zip(self._devices, found, strict=True)
        ]

    def _parted(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        """The gradients of those tensors of each output that want one.

        Where there are none at all, autograd came here all the same, and so they are undefined.
        """
        remaining = iter(gradients)
        parted: list[Gradients] = [
            [gradient for wanted, gradient in zip(wants, remaining, strict=False) if wanted] for wants in self._wants
        ]
        unused = [all(gradient is None for gradient in some) for some in parted]
        runs_all = self._context.awaits_backwards or all(unused)
        return [
            [UNDEFINED] * len(some) if runs_all and without else some
            for some, without in zip(parted, unused, strict=True)
        ]


def pipelined(run: Run, leaves: Sequence[Sequence[Tensor]]) -> list[Tree]:
    """Runs the forward of a call as one autograd node; gives the output of each micro-batch.

    `leaves` are the tensors that each micro-batch's leaves were cut from. Autograd adds up what comes back to one
    tensor in the order of the node's inputs: that of the micro-batches.
    """
    inputs = [leaf for found in leaves for leaf in found]
    anchor = torch.empty(0, requires_grad=True)  # makes autograd keep the node though no parameter is its input
    outputs: list[Output] = []
    tensors = iter(_Pipelined.apply(Call(run, inputs), outputs, anchor, *inputs))  # type: ignore[no-untyped-call]  # untyped in torch
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
