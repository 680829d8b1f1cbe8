"""Performs the actions of a rank: F and B, with receive and send. Only this code runs layers and their autograd."""

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
"""Runs autograd from the roots of a stage with their gradients; returns gradients that are kept for later."""


def receive(run: Run, rank: Rank, task: CompiledAction) -> ReadyEvent:
    """Waits for the messages that an action needs; returns when the last of them was sent."""
    mark: ReadyEvent = None
    inbox = rank.inbox = []
    for peer, label, _ in task.receives:
        if peer is None:
            inbox.append(rank.local_messages.pop(label))
        else:
            message, mark = run.context.receive(rank.rank, peer, label)
            inbox.append(message if rank.stream.alone else rank.stream.take(message, mark))
    return mark


def send(run: Run, rank: Rank, task: CompiledAction) -> None:
    """Sends the results of an action to other stages; stages of the same rank get them without a message."""
    for (peer, label, _), message in zip(task.sends, rank.outbox, strict=True):
        if peer is None:
            rank.local_messages[label] = message
        else:
            run.context.send(peer, label, message, rank.stream.mark())
    rank.outbox = ()


def forward(run: Run, rank: Rank, task: CompiledAction) -> None:
    """F: runs the layers of a stage on a micro-batch, and sends their outputs to the next stage."""
    state = new_state(run, rank, task)
    output = run_layers(run, rank, state)
    state.stage_run.buffers.forget()
    send_outputs(run, rank, task, state, output)
    if not state.routes.outs:
        state.roots = roots_of(run, rank, state, output)
    if not run.trains:
        del rank.states[task.stage, task.micro_batch]


def accumulate_all(roots: Sequence[Tensor], gradients: Gradients) -> Iterable[Tensor]:
    """Adds to `.grad` of all leaves, and keeps nothing."""
    run_backward(roots, gradients)
    return ()


def backward(run: Run, rank: Rank, task: CompiledAction, accumulate: Accumulate = accumulate_all) -> None:
    """B: runs autograd through a stage, and sends the gradients of its inputs to the stages before."""
    state = rank.states[task.stage, task.micro_batch]
    returned, rank.inbox = rank.inbox, []
    if not task.receives:
        returned.insert(0, _last_gradients(run, rank, state))
    gradients: Gradients = [*chain.from_iterable(returned)]  # type: ignore[arg-type]  # since it is a backward
    returned.clear()
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
    state.given, state.gradients = [], []
    del rank.states[task.stage, task.micro_batch]


def exchange(run: Run, rank: Rank, task: CompiledAction) -> None:
    """Performs, or ends, what the processes concerned do together."""
    run.context.close(task.action)


WORK: dict[Kind, Work] = {
    Kind.RECEIVE: receive,
    Kind.SEND: send,
    Kind.FORWARD: forward,
    Kind.BACKWARD: backward,
    **dict.fromkeys(EXCHANGES, exchange),
}
"""The functions that perform the kinds of action without any feature."""


# The parts of a forward, which features put together in another way.


def new_state(run: Run, rank: Rank, task: CompiledAction) -> MicroBatchState:
    """Returns the state of a micro-batch at a stage, with the inputs that the stage received."""
    stage, m = task.stage, task.micro_batch
    # The inputs of the first stage are wherever the caller keeps them.
    given = rank.inbox if stage else [rank.stream.take_value(run.inputs[m], None)]
    rank.inbox = []
    state = MicroBatchState(m, rank.stages[stage], run.routes[stage], given, run.context.new_progress())  # type: ignore[arg-type]  # values, since it is a forward
    rank.states[stage, m] = state
    return state


def run_layers(run: Run, rank: Rank, state: MicroBatchState) -> StageOutput:
    """Runs the layers of a stage; returns a value for each route out of it, the main one last."""
    stage, routes, given = state.stage_run.stage, state.routes, state.given
    for crossing in given:
        crossing.check(stage)
    entered = [*map(attach_boundary, given)]
    state.gradients = [each.gradients for each in entered]
    arrived = dict(zip(routes.skips_in, [each.value for each in entered], strict=False)) if routes.skips_in else {}
    key = run.rng_key(state.micro_batch)
    rank.scope.begin_forward(stage.first, key.micro_batch)
    call = StageCall(arrived, key, state.progress, rank.scope.set_layer)
    with run.hooks.around_layers(run, rank, state, entered, call):
        with run.thread_state.around_layers():
            for_loss = () if routes.outs else run.loss_pops
            output = stage.forward(entered[-1].value, call, routes.skips_out, for_loss, state.stage_run.modes)
        call.output = output
    for crossing, each in zip(given, entered, strict=True):
        if crossing.sharing and output.changed:
            tensors = tensors_in(each.value)
            if not output.changed.isdisjoint(id(tensors[at]) for at in crossing.sharing):
                raise RuntimeError(f"{stage} changes {SHARED_IN_PLACE}")
    _reject_gradients(state, "a layer")
    return output


def send_outputs(run: Run, rank: Rank, task: CompiledAction, state: MicroBatchState, output: StageOutput) -> None:
    """Sends the outputs of a stage, cut from their graph. The run keeps the outputs of the last stage."""
    if state.routes.outs:
        rank.outbox, roots = state.stage_run.detach_boundary(output.values)
        state.roots = [*chain.from_iterable(roots)]
        run.work[Kind.SEND](run, rank, task)
    elif run.loss_fn is None:
        run.outputs[task.micro_batch] = Output.of(output.values[0])


def roots_of(run: Run, rank: Rank, state: MicroBatchState, output: StageOutput) -> list[Tensor]:
    """Returns the tensors at which the backward of a stage begins: of the outputs, or the loss, computed here."""
    if state.routes.outs or run.loss_fn is None:
        return [tensor for value in output.values for tensor in tensors_in(value) if tensor.requires_grad]
    m = state.micro_batch
    state.progress.enter()
    target = rank.stream.bring_all(run.targets[m])
    rank.scope.begin_forward(len(run.stages.layers), run.first + m)
    with run.thread_state.around_layers():
        loss, metrics = run.call_loss(run, m, output.values[0], target, output.for_loss)
    _reject_gradients(state, "loss_fn")
    if run.trains and run.loss_gradients[m] is not None and not loss.requires_grad:
        raise ValueError(NO_GRADIENT)
    if metrics is not NO_METRICS:
        run.metrics[m] = metrics
    run.losses[m] = loss.data.clone()
    if type(loss) is Tensor:  # The memory of mse_loss holds all that it added up, until the backward.
        loss.data = run.losses[m]
    return [loss]


def _last_gradients(run: Run, rank: Rank, state: MicroBatchState) -> Gradients:
    """Returns the gradients with which the backward of the last stage begins."""
    if run.loss_fn is None:
        return rank.stream.take_gradients(run.output_gradients[state.micro_batch], None)
    gradient = run.loss_gradients[state.micro_batch]
    # A new tensor for each micro-batch: the `.grad` of a leaf may become a view of it.
    return [None if gradient is None else torch.full_like(state.roots[0], gradient)]


def _reject_gradients(state: MicroBatchState, what: str) -> None:
    """Rejects gradients that came before the backward: it would overwrite them."""
    for gradients in state.gradients:
        for gradient in gradients:
            if gradient is not None:
                raise RuntimeError(f"{what} {BACKWARD_INSIDE.format(stage=state.stage_run.stage)}")
