"""Makes a call of the pipe one autograd node, whose forward and backward run through the pipeline.

Stages have separate graphs, so the backward of the node can run each stage in the thread of its rank. The node owns
the state of its forward pass. Several calls can therefore run before their backward passes, and deleting an output
frees the state of its call.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpipe._torch.accelerator import current_stream, queues
from gpipe._torch.autograd import will_run
from gpipe.errors import hide_internal_frames
from gpipe.runtime.executor import run_backward_half, run_forward_half
from gpipe.runtime.run import Run
from gpipe.stages.boundary import UNDEFINED, Gradients, Output
from gpipe.stages.memory_layout import moved
from gpipe.stages.messages import Request
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

CREATE_GRAPH = (
    "create_graph=True: a pipe has no graph for higher derivatives, because stages have separate graphs. Use the "
    "model without a pipe for higher derivatives. [higher-derivatives]"
)
ONLY_SOME = (
    "backward(): torch.autograd.grad and backward(inputs=...) would also accumulate gradients in .grad of every "
    "parameter of the pipe. Call backward() without inputs=, and read .grad. [gradients-of-some-inputs]"
)

SECOND_BACKWARD = (
    "backward(): the backward pass of this call is already done, and its activations are freed. Call the pipe again, "
    "or sum the losses and call backward() once. [second-backward]"
)


def pipelined(run: Run, leaves: Sequence[Sequence[Tensor]]) -> list[Tree]:
    """Runs the forward pass of a call as one autograd node.

    Args:
        run: The run of this call of the pipe.
        leaves: For each micro-batch, its inputs that require gradients. Autograd sums the gradients of one tensor in
            the order of the micro-batches.

    Returns:
        The output of each micro-batch, in every process.
    """
    # The node needs an input on each device. Autograd then keeps the node, although no parameter is its input, and
    # makes the streams of the caller wait for the gradients.
    anchors = [torch.empty(0, requires_grad=True, device=device) for device in run.stages.devices]
    outputs: list[Output] = []
    tensors = iter(_Pipelined.apply(run, outputs, len(anchors), *anchors, *chain.from_iterable(leaves)))  # type: ignore[no-untyped-call]  # torch has no types for it.
    return [replace_tensors(output.value, lambda _: next(tensors)) for output in outputs]


class _Pipelined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, outputs: list[Output], anchors: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        run_forward_half(run)
        leaves = inputs[anchors:]
        outputs += run.context.gather_outputs(run.take_outputs(), len(run.micro_batch_sizes))
        tensors = [tensor for output in outputs for tensor in tensors_in(output.value)]
        ctx.wants = [output.wants_gradient for output in outputs]
        ctx.run, ctx.context = run, run.context
        ctx.devices = [leaf.device for leaf in leaves]
        ctx.anchor = get_gradient_edge(inputs[0]).node
        ctx.anchored = [anchor.device for anchor in inputs[:anchors]]
        ctx.set_materialize_grads(False)
        wants = chain.from_iterable(ctx.wants)
        ctx.mark_non_differentiable(*(tensor for tensor, wanted in zip(tensors, wants, strict=True) if not wanted))
        return tuple(tensors)

    @staticmethod
    @hide_internal_frames
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Runs the backward pass of all micro-batches, and returns the gradients of their inputs.

        With several processes, only the output gradients in the process with the last stage have an effect. All
        processes whose inputs require gradients receive the gradients of the inputs.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(CREATE_GRAPH)
        if not will_run(ctx.anchor):
            raise RuntimeError(ONLY_SOME)
        with ctx.context.run_scope():
            run: Run | None
            run, ctx.run = ctx.run, None
            if run is None:
                raise RuntimeError(SECOND_BACKWARD)
            with run.stages.threads.backward():
                run.context.agree(run, Request.BACKWARD)
                run.output_gradients = _split_gradients(
                    ctx.wants, gradients, runs_all=run.context.runs_every_backward
                )
                run_backward_half(run)
            for rank in run.ranks:
                rank.stream.end(in_backward=True)
            run.report_findings(run.findings)
            input_gradients = [gradient for m in range(len(run.inputs)) for gradient in run.input_gradients[m]]
            input_gradients = run.context.share_input_gradients(input_gradients, run.input_shapes)
            run.context.finish(run)
        pairs = zip(ctx.devices, input_gradients, strict=True)
        returned = [moved(g, device) if isinstance(g, Tensor) else None for device, g in pairs]
        for device in filter(queues, set(ctx.devices)):  # Autograd waits only for the stream of this node.
            torch.accelerator.current_stream().wait_stream(current_stream(device))
        return (None, None, None, *(torch.empty(0, device=device) for device in ctx.anchored), *returned)


def _split_gradients(
    wants: Sequence[Sequence[bool]], gradients: Sequence[Tensor | None], *, runs_all: bool
) -> list[Gradients]:
    """Splits gradients by output. An unused output whose backward must run has UNDEFINED."""
    remaining = iter(gradients)
    by_output: list[Gradients] = [[g for w, g in zip(output, remaining, strict=False) if w] for output in wants]
    unused = [all(gradient is None for gradient in output) for output in by_output]
    runs_all = runs_all or all(unused)
    pairs = zip(by_output, unused, strict=True)
    return [[UNDEFINED] * len(output) if runs_all and is_unused else output for output, is_unused in pairs]
