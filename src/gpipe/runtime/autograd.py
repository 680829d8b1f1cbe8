"""A call of the pipe under grad: one autograd node whose forward and backward are pipelined.

The graph is cut at stage boundaries, so the backward of the node can run each stage in the thread of its rank. The
node holds the state of its forward: several forwards may precede their backwards, and a dropped output frees it.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpipe._torch.accelerator import current_stream, queues
from gpipe._torch.autograd import will_run
from gpipe.errors import entrance
from gpipe.runtime.executor import run_backward, run_forward
from gpipe.runtime.run import Run
from gpipe.stages.boundary import UNDEFINED, Gradients, Output
from gpipe.stages.memory_layout import moved
from gpipe.stages.messages import Request
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


def pipelined(run: Run, leaves: Sequence[Sequence[Tensor]]) -> list[Tree]:
    """Runs the forward of a call as one autograd node; returns the output of each micro-batch, in every process.

    `leaves` are the tensors that each micro-batch's leaves were cut from. Autograd adds up the gradients of one
    tensor in the order of the inputs of the node: that of the micro-batches.
    """
    # One anchor on each device: autograd keeps the node though no parameter is its input, and makes the streams of
    # the caller wait for the gradients of the anchors, and so for those of parameters.
    anchors = [torch.empty(0, requires_grad=True, device=device) for device in run.stages.devices]
    outputs: list[Output] = []
    tensors = iter(_Pipelined.apply(run, outputs, len(anchors), *anchors, *chain.from_iterable(leaves)))  # type: ignore[no-untyped-call]  # untyped in torch
    return [replace_tensors(output.value, lambda _: next(tensors)) for output in outputs]


class _Pipelined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, outputs: list[Output], anchors: int, *given: Tensor) -> tuple[Tensor, ...]:
        run_forward(run)
        leaves = given[anchors:]
        outputs += run.context.gather_outputs(run.take_outputs(), len(run.micro_batch_sizes))
        tensors = [tensor for output in outputs for tensor in tensors_in(output.value)]
        ctx.wants = [output.wants_gradient for output in outputs]
        ctx.run, ctx.context = run, run.context
        ctx.devices = [leaf.device for leaf in leaves]
        ctx.anchor = get_gradient_edge(given[0]).node
        ctx.anchored = [anchor.device for anchor in given[:anchors]]
        ctx.set_materialize_grads(False)
        wants = chain.from_iterable(ctx.wants)
        ctx.mark_non_differentiable(*(tensor for tensor, wanted in zip(tensors, wants, strict=True) if not wanted))
        return tuple(tensors)

    @staticmethod
    @entrance
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Runs all backwards; returns the gradients of the leaves, micro-batch after micro-batch.

        Over processes only the output gradients of the last stage count. Input gradients reach all processes whose
        inputs have a graph.
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
                run.output_gradients = _parted(ctx.wants, gradients, runs_all=run.context.runs_every_backward)
                run_backward(run)
            for rank in run.ranks:
                rank.stream.end(in_backward=True)
            run.report_findings(run.findings)
            found = [gradient for m in range(len(run.inputs)) for gradient in run.input_gradients[m]]
            found = run.context.share_input_gradients(found, run.input_shapes)
            run.context.finish(run)
        each = zip(ctx.devices, found, strict=True)
        given = [moved(one, device) if isinstance(one, Tensor) else None for device, one in each]
        for device in filter(queues, set(ctx.devices)):  # autograd knows this node's stream alone
            torch.accelerator.current_stream().wait_stream(current_stream(device))
        return (None, None, None, *(torch.empty(0, device=device) for device in ctx.anchored), *given)


def _parted(
    wants: Sequence[Sequence[bool]], gradients: Sequence[Tensor | None], *, runs_all: bool
) -> list[Gradients]:
    """The gradients of each output. Undefined for an output without any, if its backward must run all the same."""
    remaining = iter(gradients)
    parted: list[Gradients] = [[g for wanted, g in zip(some, remaining, strict=False) if wanted] for some in wants]
    unused = [all(gradient is None for gradient in some) for some in parted]
    runs_all = runs_all or all(unused)
    each = zip(parted, unused, strict=True)
    return [[UNDEFINED] * len(some) if runs_all and without else some for some, without in each]
