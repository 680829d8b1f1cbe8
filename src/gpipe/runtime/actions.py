"""The work of each kind of action: the only code that runs the layers and the autograd of a mini-batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from gpipe.runtime.offload import Inside
from gpipe.runtime.run import Output, Rank, Run, Saved
from gpipe.runtime.split_backward import backward_input, backward_weight
from gpipe.runtime.steps import CompiledAction, Connections
from gpipe.schedule.action import MOVES, Action, Kind
from gpipe.schedule.rules import BACKWARDS
from gpipe.stages.boundary import Gradients, attach_boundary, failed_node, run_backward, set_apart
from gpipe.stages.losses import NO_GRADIENT, NO_METRICS
from gpipe.stages.messages import Message, ReadyEvent
from gpipe.stages.recompute_check import Fingerprint, recompute_error, tensors_left_on
from gpipe.stages.slices import SliceKeys
from gpipe.stages.stage import BACKWARD_INSIDE, SHARED_IN_PLACE, Stage, StageCall, StageOutput, StageRun
from gpipe.stages.tree import Tree, replace_tensors, tensors_in, version

Work: TypeAlias = Callable[[Run, Rank, CompiledAction], None]
_NOTHING = nullcontext()


def receive(run: Run, rank: Rank, todo: CompiledAction) -> ReadyEvent:
    """Waits until what an action needs of other ranks is here; says when the last of it was sent."""
    mark: ReadyEvent = None
    taken = rank.taken = []
    for peer, label, _ in todo.takes:
        if peer is None:
            taken.append(rank.handed.pop(label))
        else:
            message, mark = run.context.receive(rank.rank, peer, label)
            taken.append(message if rank.stream.alone else rank.stream.take(message, mark))
    return mark


def await_fetch(rank: Rank, todo: CompiledAction) -> None:
    """Waits until what a backward needs of the host is back."""
    saved = rank.saved.get((todo.stage, todo.micro_batch))
    if rank.host is not None and todo.action.kind in BACKWARDS and saved is not None and saved.inside is not None:
        rank.host.finish(saved.inside)
        saved.inside.arrive()
        saved.inside = None


def send(run: Run, rank: Rank, todo: CompiledAction, messages: Sequence[Message]) -> None:
    """Sends the results of an action to other stages; those of this rank get them without a message."""
    if run.record is not None:
        run.record.note_sent(todo, [*messages])
    for (peer, label, _), message in zip(todo.gives, messages, strict=True):
        if peer is None:
            rank.handed[label] = message
        else:
            run.context.send(peer, label, message, rank.stream.mark())


def forward(run: Run, rank: Rank, todo: CompiledAction) -> None:
    """F: runs a stage's layers on a micro-batch; with a recompute to come, keeps only what crossed the boundary."""
    at, m = todo.stage, todo.micro_batch
    own, ends = rank.stages[at], run.connections[at]
    # what the first stage is given is wherever the user keeps it; all others were brought crossings
    given = rank.taken if at else [rank.stream.take_value(run.inputs[m], None)]
    rank.taken = []
    saved = rank.saved[at, m] = Saved(given, run.context.new_progress(), keys=_keys(run, rank, at, m))  # type: ignore[arg-type]  # crossings, since it is a forward
    again = m in ends.recomputed
    before = own.buffers.before() if again else None
    if m in ends.offloaded:
        saved.inside = Inside()
    watched = _NOTHING if saved.inside is None else saved.inside.watched()
    with rank.deferred[at].collect(m) if at in rank.deferred else _NOTHING, watched:
        made = _run_layers(run, rank, own, ends, saved, m)
    if before is None:
        own.buffers.forget()
    else:
        own.buffers.after(before)
        saved.snapshot = before
    if ends.outs:
        crossings, roots = own.detach_boundary(made.values)
        saved.roots = [*chain.from_iterable(roots)]
        send(run, rank, todo, crossings)
    else:
        if run.loss_fn is None:
            run.outputs[m] = Output.of(made.values[0])
        if not again:
            with watched:
                saved.roots = _last_roots(run, rank, saved, made, m)
    if again:
        saved.fingerprint = Fingerprint.of(made)
        saved.roots, saved.gradients = [], []  # and with them all that the layers made inside
    _keep(run, rank, at, m, again=again)


def _keys(run: Run, rank: Rank, at: int, m: int) -> SliceKeys | None:
    """What a slice of a micro-batch takes from those before it, and will leave to those behind."""
    if run.slices == 1:
        return None
    before_it = (rank.saved[at, one].keys for one in range(m - m % run.slices, m))
    return SliceKeys([keys for keys in before_it if keys is not None])


def _keep(run: Run, rank: Rank, at: int, m: int, *, again: bool) -> None:
    """Keeps what slices behind will attend to; without a backward, nothing once the last slice is through."""
    if (keys := rank.saved[at, m].keys) is not None:
        keys.keep(again=again)
    if not run.trains and (m + 1) % run.slices == 0:
        for one in range(m + 1 - run.slices, m + 1):
            del rank.saved[at, one]


def recompute(run: Run, rank: Rank, todo: CompiledAction) -> None:
    """R: runs a stage's layers once more, for their graph; the bits must be those of the forward."""
    at, m = todo.stage, todo.micro_batch
    own, ends, saved = rank.stages[at], run.connections[at], rank.saved[at, m]
    saved.progress = run.context.new_progress()  # of this time, not of the one before
    aside = rank.deferred[at].collect() if at in rank.deferred else _NOTHING
    assert saved.fingerprint is not None
    assert saved.snapshot is not None
    as_before = partial(own.buffers.as_before, saved.snapshot)
    with as_before(), aside:
        given = run, rank, own, ends, saved, m
        made = _run_layers(*given) if run.variables is None else run.variables.run(_run_layers, *given)
        differs = saved.fingerprint.differs(made, own.stage, saved.given)
        if differs is True:
            _refuse_recompute(run, own, ends, saved, m, as_before)
    if isinstance(differs, Tensor):  # on a GPU, where to know it now would halt it
        rank.doubts.append(differs)
    saved.snapshot = None
    if ends.outs:
        saved.roots = [*chain.from_iterable(map(_wanting, made.values))]
    else:
        saved.roots = _last_roots(run, rank, saved, made, m)


def backward(run: Run, rank: Rank, todo: CompiledAction) -> None:
    """B or I: runs autograd through a stage, or its first part; sends the gradients of what crossed its boundary."""
    at, m = todo.stage, todo.micro_batch
    own, saved = rank.stages[at], rank.saved[at, m]
    returned = rank.taken if todo.takes else [_last_gradients(run, rank, saved, m)]
    gradients: Gradients = [*chain.from_iterable(returned)]  # type: ignore[arg-type]  # since it is a backward
    returned.clear()
    roots, saved.roots = saved.roots, []
    if saved.keys is not None:
        some, theirs = saved.keys.take_gradients()
        roots, gradients = [*roots, *some], [*gradients, *theirs]
        del some, theirs
    waiting = rank.waiting[at]
    rank.scope.go_back(partial(saved.progress.maker_of, layers=own.stage.layers))
    if todo.action.kind is Kind.BACKWARD or own.is_sharded:
        for one in waiting.values():
            backward_weight(one)
        run_backward(roots, gradients)
    else:
        leaves = [leaf for crossing in saved.given for leaf in crossing.leaves]
        waiting[m] = backward_input(roots, gradients, leaves, list(waiting.values()))
    del gradients
    set_apart(saved.gradients, waiting[m].gradients if m in waiting else ())
    if at:
        send(run, rank, todo, saved.gradients)
    else:
        run.input_gradients[m] = saved.gradients[-1]
    saved.given, saved.gradients = [], []
    if todo.action.kind is Kind.BACKWARD:
        del rank.saved[at, m]


def backward_of_weights(run: Run, rank: Rank, todo: CompiledAction) -> None:
    """W: runs the second part of a backward, which adds up the gradients of weights that waited."""
    at, m = todo.stage, todo.micro_batch
    saved, waiting = rank.saved[at, m], rank.waiting[at]
    if m in waiting:
        rank.scope.go_back(partial(saved.progress.maker_of, layers=rank.stages[at].stage.layers))
        backward_weight(waiting[m])
        del waiting[m]
    del rank.saved[at, m]


def move(run: Run, rank: Rank, todo: CompiledAction) -> None:
    """OFFLOAD or FETCH: begins to move what autograd keeps of a micro-batch to the host, or back."""
    inside = rank.saved[todo.stage, todo.micro_batch].inside
    assert rank.host is not None
    assert inside is not None
    begin = rank.host.offload if todo.action.kind is Kind.OFFLOAD else rank.host.fetch
    begin(todo.action, inside)


def commit(run: Run, rank: Rank, todo: CompiledAction) -> None:
    """COMMIT: notes that a stage's statistics are whole; `settle` commits them once the run has ended well."""
    rank.commits.append(todo.stage)


def close(run: Run, rank: Rank, todo: CompiledAction) -> None:
    """TIE, RESHARD, or the end of an UNSHARD or REDUCE: with the other processes that it concerns."""
    run.context.close(todo.action)


WORK: dict[Kind, Work] = {
    Kind.FORWARD: forward,
    Kind.RECOMPUTE: recompute,
    Kind.BACKWARD: backward,
    Kind.BACKWARD_INPUT: backward,
    Kind.BACKWARD_WEIGHT: backward_of_weights,
    Kind.UNSHARD: close,
    Kind.RESHARD: close,
    Kind.OFFLOAD: move,
    Kind.FETCH: move,
    Kind.COMMIT: commit,
    Kind.TIE: close,
    Kind.REDUCE: close,
}
"""What is done for each kind of action; `receive` and `send` are done with the action that they are for."""


def layer_of(rank: Rank, action: Action, error: BaseException) -> str | None:
    """In words, the layer in which an action failed, as far as that can be known."""
    at, m = action.stage, action.micro_batch
    layers = rank.stages[at].stage.layers
    if m is None or (at, m) not in rank.saved or action.kind in MOVES:
        return None
    progress = rank.saved[at, m].progress
    if action.kind in BACKWARDS:
        layer = progress.maker_of(failed_node(error), layers)
    elif action.kind is Kind.BACKWARD_WEIGHT:
        layer = progress.maker_of(rank.waiting[at][m].next_node if m in rank.waiting[at] else None, layers)
    else:
        layer = progress.last_of(layers)
    return layer or f"one of {', '.join(map(str, layers))}"


def _run_layers(run: Run, rank: Rank, own: StageRun, ends: Connections, saved: Saved, m: int) -> StageOutput:
    """Runs the layers of a stage on what was kept; gives a value for each connection out, the main one last."""
    stage, key = own.stage, run.rng_key(m)
    for crossing in saved.given:
        crossing.check(stage)
    entered = list(map(attach_boundary, saved.given))
    if run.record is not None:
        run.record.note_boundary(stage, ends, entered, saved.given)
    saved.gradients = [one.gradients for one in entered]
    arrived = dict(zip(ends.skips_in, (one.value for one in entered), strict=False)) if ends.skips_in else {}
    rank.scope.go_to(stage.first, key.micro_batch)
    watch = None if run.record is None else run.record.watch(stage.index, m)
    call = StageCall(arrived, key, saved.progress, rank.scope.go_on, keys=saved.keys, watch=watch)
    with run.thread_state.around_layers():
        for_loss = () if ends.outs else run.loss_pops
        made = stage.forward(entered[-1].value, call, ends.skips_out, for_loss, own.modes)
    if run.record is not None:
        run.record.check_hooks(stage)
    for crossing, arrived_value in zip(saved.given, entered, strict=True):
        if crossing.sharing and made.changed:
            given = tensors_in(arrived_value.value)
            if not made.changed.isdisjoint(id(given[at]) for at in crossing.sharing):
                raise RuntimeError(f"{stage} changes {SHARED_IN_PLACE}")
    _refuse_gradients(saved, stage, "a layer")
    return made


def _refuse_gradients(saved: Saved, stage: Stage, what: str) -> None:
    """Refuses gradients that are there before the backward: another one would take their place."""
    for some in saved.gradients:
        for gradient in some:
            if gradient is not None:
                raise RuntimeError(f"{what} {BACKWARD_INSIDE.format(stage=stage)}")


def _wanting(value: Tree) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def _last_roots(run: Run, rank: Rank, saved: Saved, made: StageOutput, m: int) -> list[Tensor]:
    """What gradients come back to at the last stage: what of the output wants one, or the loss, computed once."""
    if run.record is not None:
        run.record.note_outputs(len(run.engine.stages) - 1, m, made.values[0])
    if run.loss_fn is None:
        return _wanting(made.values[0])
    target = run.targets[m]
    saved.progress.enter()
    if not rank.stream.alone:
        target = replace_tensors(target, lambda tensor: rank.stream.bring(tensor, None))
    rank.scope.go_to(len(run.engine.layers), run.first + m)
    with run.thread_state.around_layers():
        loss, metrics = run.call_loss_fn(m, made.values[0], target, made.for_loss)
    _refuse_gradients(saved, rank.stages[len(run.engine.stages) - 1].stage, "loss_fn")
    if run.trains and run.loss_gradients[m] is not None and not loss.requires_grad:
        raise ValueError(NO_GRADIENT)
    if metrics is not NO_METRICS:
        run.metrics[m] = metrics
    run.losses[m] = loss.data.clone()
    if type(loss) is Tensor:  # mse_loss keeps the memory of all that it added up, until the backward
        loss.data = run.losses[m]
    return [loss]


def _last_gradients(run: Run, rank: Rank, saved: Saved, m: int) -> Gradients:
    if run.loss_fn is None:
        return rank.stream.take_gradients(run.output_gradients[m], None)
    gradient = run.loss_gradients[m]
    if gradient is None:
        return [None]
    return [torch.full_like(saved.roots[0], gradient)]  # one for each: a leaf's `.grad` may become a view of it


def _refuse_recompute(
    run: Run,
    own: StageRun,
    ends: Connections,
    saved: Saved,
    m: int,
    as_before: Callable[[], AbstractContextManager[None]],
) -> None:
    """Refuses a recompute that differs, and says which layer is to blame, if it does so again."""
    arrived = {name: crossing.value for name, crossing in zip(ends.skips_in, saved.given, strict=False)}
    call, layer = StageCall(arrived, run.rng_key(m), saved.progress), None
    weights = {
        part.full_name(name): weight for part in own.stage.layers for name, weight in part.module.named_parameters()
    }
    versions = {name: version(weight) for name, weight in weights.items()}
    if not run.context.awaits_backwards:  # else BatchNorm would wait for what the replicas do not send again
        with run.thread_state.around_layers():
            layer = own.stage.find_unsteady(saved.given[-1].value, call, as_before)
    written = [name for name, weight in weights.items() if version(weight) != versions[name]]
    if layer is None:
        raise recompute_error("a layer of this partition", tensors_left_on(run.engine.own), written)
    saved.progress.found = str(layer)
    raise recompute_error(str(layer), written=written)
