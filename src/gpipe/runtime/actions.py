"""Performs the actions F (forward) and B (backward) of a rank, and receives and sends their messages.

Only this module runs layers and their backward passes. Features wrap its functions.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from gpipe.batch.losses import NO_GRADIENT, NO_METRICS
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.feature import Work
from gpipe.runtime.run import MicroBatchState, Rank, Run
from gpipe.schedule.action import EXCHANGES, Kind
from gpipe.stages.boundary import Gradients, Output, attach_boundary, clone_shared_gradients, run_backward
from gpipe.stages.messages import ReadyEvent
from gpipe.stages.stage import BACKWARD_INSIDE, SHARED_IN_PLACE, StageCall, StageOutput
from gpipe.stages.tree import tensors_in

Accumulate: TypeAlias = Callable[[Sequence[Tensor], Gradients], Iterable[Tensor]]
"""Runs autograd from the roots of a stage with their gradients. Returns the gradients that it keeps for later."""

_ONLY_NONE = frozenset({None})


def receive(run: Run, rank: Rank, task: CompiledAction) -> ReadyEvent:
    """Receives the messages that an action needs into the inbox, and returns the event of the last message."""
    mark: ReadyEvent = None
    inbox = rank.inbox = []
    for peer, label, _ in task.receives:
        if peer is None:
            inbox.append(rank.local_messages.pop(label))
        else:
            message, mark = run.context.receive(rank.rank, peer, label)
            inbox.append(message if rank.stream.single_device else rank.stream.receive(message, mark))
    return mark


def send(run: Run, rank: Rank, task: CompiledAction) -> None:
    """Sends the messages in the outbox of an action. Messages between stages of one rank stay in the rank."""
    for (peer, label, _), message in zip(task.sends, rank.outbox, strict=True):
        if peer is None:
            rank.local_messages[label] = message
        else:
            run.context.send(peer, label, message, rank.stream.mark())
    rank.outbox = ()


def forward(run: Run, rank: Rank, task: CompiledAction) -> None:
    """F: runs the layers of a stage on a micro-batch, and sends the output to later stages."""
    state = new_state(run, rank, task)
    output = run_layers(run, rank, state)
    state.stage_run.buffers.forget()
    send_outputs(run, rank, task, state, output)
    if not state.routes.outs:
        state.roots = roots_of(run, rank, state, output)
    if not run.trains:
        del rank.states[task.stage, task.micro_batch]


def accumulate_all(roots: Sequence[Tensor], gradients: Gradients) -> Iterable[Tensor]:
    """Accumulates gradients in `.grad` of all leaf tensors, and keeps none for later."""
    run_backward(roots, gradients)
    return ()


def backward(run: Run, rank: Rank, task: CompiledAction, accumulate: Accumulate = accumulate_all) -> None:
    """B: runs the backward pass of a stage, and sends the gradients of its inputs to earlier stages."""
    state = rank.states[task.stage, task.micro_batch]
    received, rank.inbox = rank.inbox, []
    if not task.receives:
        received.insert(0, _last_gradients(run, rank, state))
    gradients: Gradients = [*chain.from_iterable(received)]  # type: ignore[arg-type]  # A backward receives gradients.
    received.clear()
    roots, state.roots = state.roots, []
    rank.scope.begin_backward(partial(state.progress.maker_of, layers=state.stage_run.stage.layers))
    kept = accumulate(roots, gradients)
    del gradients
    clone_shared_gradients(state.gradients, kept)
    if task.stage:
        rank.outbox = state.gradients
        run.work[Kind.SEND](run, rank, task)
    else:
        run.input_gradients[task.micro_batch] = state.gradients[-1]
    state.inputs, state.gradients = [], []
    del rank.states[task.stage, task.micro_batch]


def exchange(run: Run, rank: Rank, task: CompiledAction) -> None:
    """Performs a collective action of several processes, or waits for one that was started."""
    run.context.finish_exchange(task.action)


WORK: dict[Kind, Work] = {
    Kind.RECEIVE: receive,
    Kind.SEND: send,
    Kind.FORWARD: forward,
    Kind.BACKWARD: backward,
    **dict.fromkeys(EXCHANGES, exchange),
}
"""The functions that perform each kind of action if no feature changes them."""


# The parts of a forward pass. Recompute combines them differently.


def new_state(run: Run, rank: Rank, task: CompiledAction) -> MicroBatchState:
    """Creates the state of a micro-batch at a stage, with the inputs that the stage received."""
    stage, m = task.stage, task.micro_batch
    # The inputs of the first stage may be on a different device.
    inputs = rank.inbox if stage else [rank.stream.receive_value(run.inputs[m], None)]
    rank.inbox = []
    state = MicroBatchState(m, rank.stages[stage], run.routes[stage], inputs, run.context.new_progress())  # type: ignore[arg-type]  # A forward receives values.
    rank.states[stage, m] = state
    return state


def run_layers(run: Run, rank: Rank, state: MicroBatchState) -> StageOutput:
    """Runs the layers of a stage. The output has one value per route out of the stage, with the main route last."""
    stage, routes, inputs = state.stage_run.stage, state.routes, state.inputs
    state.gradients, attached = [], []
    for boundary in inputs:
        boundary.check(stage)
        attached.append(entry := attach_boundary(boundary))
        state.gradients.append(entry.gradients)
    skips = dict(zip(routes.skips_in, [entry.value for entry in attached], strict=False)) if routes.skips_in else {}
    key = run.rng_key(state.micro_batch)
    rank.scope.begin_forward(stage.first, key.micro_batch)
    call = StageCall(skips, key, state.progress, rank.scope.set_layer)
    with run.hooks.around_layers(run, rank, state, attached, call):
        with run.thread_state.around_layers():
            for_loss = () if routes.outs else run.loss_pops
            output = stage.forward(attached[-1].value, call, routes.skips_out, for_loss, state.stage_run.modes)
        call.output = output
    for boundary, entry in zip(inputs, attached, strict=True):
        if boundary.sharing and output.changed:
            tensors = tensors_in(entry.value)
            if not output.changed.isdisjoint(id(tensors[index]) for index in boundary.sharing):
                raise RuntimeError(SHARED_IN_PLACE.format(stage=stage))
    _reject_gradients(state, "a layer")
    return output


def send_outputs(run: Run, rank: Rank, task: CompiledAction, state: MicroBatchState, output: StageOutput) -> None:
    """Detaches the outputs of a stage and sends them. In a call, the run keeps the outputs of the last stage."""
    if state.routes.outs:
        rank.outbox, roots = state.stage_run.detach_boundary(output.values)
        state.roots = [*chain.from_iterable(roots)]
        run.work[Kind.SEND](run, rank, task)
    elif run.loss_fn is None:
        run.outputs[task.micro_batch] = Output.of(output.values[0])


def roots_of(run: Run, rank: Rank, state: MicroBatchState, output: StageOutput) -> list[Tensor]:
    """Returns the tensors at which the backward pass of a stage starts. The last stage of a step calls `loss_fn`."""
    if state.routes.outs or run.loss_fn is None:
        return [tensor for value in output.values for tensor in tensors_in(value) if tensor.requires_grad]
    m = state.micro_batch
    state.progress.enter()
    target = rank.stream.tree_to_device(run.targets[m])
    rank.scope.begin_forward(len(run.stages.layers), run.first + m)
    with run.thread_state.around_layers():
        loss, metrics = run.call_loss(run, m, output.values[0], target, output.for_loss)
    _reject_gradients(state, "loss_fn")
    if run.trains and run.loss_gradients[m] is not None and not loss.requires_grad:
        raise ValueError(NO_GRADIENT)
    if metrics is not NO_METRICS:
        run.metrics[m] = metrics
    run.losses[m] = loss.data.clone()
    if type(loss) is Tensor:  # The result of mse_loss keeps the unreduced losses alive; the copy frees them.
        loss.data = run.losses[m]
    return [loss]


def _last_gradients(run: Run, rank: Rank, state: MicroBatchState) -> Gradients:
    """Returns the gradients of the roots of the last stage."""
    if run.loss_fn is None:
        return rank.stream.receive_gradients(run.output_gradients[state.micro_batch], None)
    gradient = run.loss_gradients[state.micro_batch]
    # Each micro-batch needs a new tensor, because the `.grad` of a leaf may become a view of it.
    return [None if gradient is None else torch.full_like(state.roots[0], gradient)]


def _reject_gradients(state: MicroBatchState, source: str) -> None:
    """Raises an error if the inputs already have gradients, because a backward pass would overwrite them."""
    if not _ONLY_NONE.issuperset(chain.from_iterable(state.gradients)):
        raise RuntimeError(BACKWARD_INSIDE.format(source=source, stage=state.stage_run.stage))
