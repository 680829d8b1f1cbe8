"""The passes of a mini-batch through the stages: forwards and backwards together, or first all of the one.

A `step` is one pass. A call is two, its forward and its backward, and whatever else comes between them. In a pass
each rank does its actions in their order, all ranks in the calling thread or each in its own.

Three ranks, four micro-batches, fill-drain; F forwards, B backwards, each of a micro-batch:

    rank 0   F0 F1 F2 F3          B0 B1 B2 B3
    rank 1      F0 F1 F2 F3    B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3

Before it does an action, a rank receives what the action needs; behind it, it sends what others need of it.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import Context, copy_context
from functools import partial

import torch

from gpipe._torch.modes import as_rank, intra_op_threads, variables_of_torch
from gpipe.errors import RemoteError
from gpipe.runtime.actions import WORK, await_fetch, receive
from gpipe.runtime.notes import add_note
from gpipe.runtime.run import Rank, Run
from gpipe.runtime.steps import CompiledAction, CompiledTable
from gpipe.runtime.threads import ThreadState
from gpipe.runtime.verification import begin as begin_record
from gpipe.runtime.verification import verify
from gpipe.schedule.action import Kind
from gpipe.stages.messages import Cancelled
from gpipe.stages.recompute_check import recompute_error
from gpipe.stages.rng import RankScope, unseeded
from gpipe.stages.tree import is_sharded, tensors_in, version


def run_step(run: Run) -> None:
    """Runs the whole table."""
    with run.engine.threads.turn():
        run.prepare()
        _run_table(run, run.compiled.whole)
        _finish(run)


def run_forward(run: Run) -> None:
    """Runs the forward half; what the backward half needs is kept."""
    with run.engine.threads.turn():
        run.prepare()
        if any(ends.recomputed for ends in run.connections):
            run.thread_state.refuse_unsupported(
                ", and would not see what a backward recomputes of this call; use step(), or remat='never'"
            )
        _run_table(run, run.compiled.forward)
        run.variables = copy_context() if run.engine.queues else None
        run.versions = _find_versions(run)  # behind it: lazy modules come by theirs in it


def run_backward(run: Run) -> None:
    """Runs the backward half."""
    # autograd's own thread of a device is not to wait for a step of another caller, which needs it
    with nullcontext() if run.engine.queues else run.engine.threads.turn():
        if _find_versions(run) != run.versions:
            raise RuntimeError(
                "a parameter was changed or replaced, or train() or eval() was called, between a forward and its "
                "backward, which would recompute with the new value; call backward first, or use remat='never'"
            )
        _run_table(run, run.compiled.backward, backward=True)
        _finish(run)


def run_rank(run: Run, rank: Rank, table: CompiledTable) -> None:
    """Does the actions of one rank, in its own thread or process."""
    context, at = run.context, 0
    try:
        scope = RankScope(run.seed, run.step_number)
        with run.thread_state.rank_thread(), as_rank(), rank.stream.enter(), scope as rank.scope:
            reducing: list[CompiledAction] = []
            gathering: dict[int, CompiledAction] = {}  # by stage
            for todo in table.rows[rank.rank]:
                at = todo.at
                if context.cancelled:
                    raise Cancelled
                context.reach(at)
                if todo.action.kind is Kind.REDUCE:
                    context.begin(todo.action)
                    reducing.append(todo)
                elif todo.action.kind is Kind.UNSHARD:
                    context.begin(todo.action)
                    gathering[todo.stage] = todo
                else:
                    if todo.stage in gathering:
                        do(run, rank, gathering.pop(todo.stage))
                    do(run, rank, todo)
            for todo in reducing:
                at = todo.at
                do(run, rank, todo)
    except Cancelled:
        raise
    except BaseException as error:
        if not (isinstance(error, RemoteError) and error.received):
            add_note(error, run, rank, table.program, at)
        raise


def lockstep(run: Run, table: CompiledTable) -> None:
    """Does the actions of all ranks in the calling thread, in one legal order: what a debugger wants to see."""
    with run.thread_state.rank_thread(), RankScope(run.seed, run.step_number) as scope:
        for rank in run.ranks:
            rank.scope = scope
        for todo in table.actions:
            rank = run.ranks[todo.rank]
            try:
                with rank.stream.enter():
                    do(run, rank, todo)
            except BaseException as error:
                add_note(error, run, rank, table.program, todo.at)
                raise


def do(run: Run, rank: Rank, todo: CompiledAction) -> None:
    """Does one action."""
    if run.recorder is not None:
        run.recorder.do(run, rank, todo)
        return
    if todo.takes:
        receive(run, rank, todo)
    await_fetch(rank, todo)
    run.work[todo.action.kind](run, rank, todo)
    rank.stream.keep_pace()


def _run_table(run: Run, table: CompiledTable, *, backward: bool = False) -> None:
    """Has the ranks of this process do their actions of a table, or of half of one.

    The backward of a call runs on devices with streams in this thread: it is autograd's thread of the device, and
    backwards in other threads would wait for it for ever.
    """
    engine, autocasts = run.engine, run.thread_state.autocasts
    in_threads = engine.threaded and not (backward and engine.queues)
    _begin(run, backward=backward)
    if in_threads:
        ThreadState.here().refuse_unsupported(  # of a backward, too
            " in the calling thread and would not see what the rank threads do; leave it outside, or use "
            "driver='lockstep', which runs in the calling thread"
        )
    if autocasts:  # it begins and ends with no casts kept, as ThreadState says
        torch.clear_autocast_cache()
    try:
        run.aliases.put_in_place()
        with unseeded(engine.devices), intra_op_threads(engine.intra_op_threads):
            _run_ranks(run, table, in_threads=in_threads)
        run.aliases.put_back()
    except BaseException as error:
        run.aliases.put_back()
        _clear(run)
        if isinstance(error, KeyboardInterrupt) and run.trains:
            error.add_note(INTERRUPTED)
        raise
    finally:
        for rank in run.ranks:
            rank.stream.end()
        if autocasts:
            torch.clear_autocast_cache()
    for rank in run.ranks:
        if rank.doubts and bool(torch.stack(rank.doubts).any()):  # on a GPU
            raise recompute_error(f"a layer of {run.context.name(rank.rank)}")
    if run.recorder is not None:
        run.recorder.end()


def _begin(run: Run, *, backward: bool) -> None:
    """Follows what others have done to the layers since, and begins the work of each rank and its record."""
    if run.trains and (wait := run.engine.threads.left) is not None:
        wait()
        modules = (layer.module for stage in run.engine.own for layer in stage.layers)
        gradients = (weight.grad for module in modules for weight in module.parameters())
        if any(gradient is not None and gradient.to_dense().any() for gradient in gradients):
            raise RuntimeError(LEFT)
        run.engine.threads.left = None
    given = [*run.targets, *(run.output_gradients if backward else [crossing.value for crossing in run.inputs])]
    devices = {tensor.device for tensor in tensors_in(given)}
    for rank in run.ranks:
        for at, own in rank.stages.items():
            if run.connections[at].recomputed or not backward:
                own.stage.begin()
        rank.stream.begin(devices)
    if run.recorder is not None:
        run.recorder.begin(run.engine.streams)


def _run_ranks(run: Run, table: CompiledTable, *, in_threads: bool) -> None:
    """Has each rank do its actions in its own thread, or all in this one."""
    with run.context.running(table, run.aliases):
        _begin_record(run, table)
        run.work = WORK if run.record is None else run.record.work
        if in_threads:
            variables = [copy_context() for _ in run.ranks]
            ranks = zip(variables, run.ranks, strict=True)
            jobs = [partial(own.run, run_rank, run, rank, table) for own, rank in ranks]
            run.engine.threads.run(jobs, run.context.cancel)
            if run.record is not None:
                run.findings += _variables_set(variables)
        elif run.engine.row is None:
            lockstep(run, table)
        else:
            run_rank(run, run.ranks[0], table)
        if run.record is not None and table is run.compiled.forward:
            run.record.check_gradients(run)
        elif run.record is not None:
            verify(run, in_threads=in_threads)
    for rank in run.ranks:
        if rank.host is not None:
            rank.host.finish()
    _share_commits(run)


def _begin_record(run: Run, table: CompiledTable) -> None:
    """Starts the record of a verified pass, and notes the gradients that there are before it."""
    if run.verifies and run.verifier is not None and table is not run.compiled.backward:
        begin_record(run, run.verifier)
    if run.record is None:
        return
    if table is run.compiled.forward:
        run.record.note_gradients(run)
    else:
        run.record.begin_backwards(run)
    for rank in run.ranks:  # after the copies that were made here
        rank.stream.begin([*rank.stream.called])


def _share_commits(run: Run) -> None:
    """Has all processes of replicas have the statistics that they are about to commit."""
    for rank in run.ranks:
        if rank.commits:
            with rank.stream.enter():
                run.context.share({stage: rank.deferred[stage] for stage in sorted(rank.commits)})


def _find_versions(run: Run) -> tuple[list[tuple[int, int]], list[bool]]:
    """What a recompute depends on: which parameters, how often changed, and the modules' modes."""
    again = [stage for stage in run.engine.own if run.connections[stage.index].recomputed]
    modules = [layer.module for stage in again for layer in stage.layers]
    weights = [(id(parameter), version(parameter)) for module in modules for parameter in module.parameters()]
    parts = [part for module in modules for part in module.modules()]
    return [] if any(map(is_sharded, parts)) else weights, [part.training for part in parts]


def _finish(run: Run) -> None:
    if run.trains and run.engine.shared and not run.compiled.ties:
        run.aliases.add_up()
    for rank in run.ranks:
        if rank.host is not None:
            rank.host.close()
        if rank.saved or rank.handed:
            raise AssertionError(f"the store of rank {rank.rank} is not empty after the step; this is a bug in gpipe")


def _clear(run: Run) -> None:
    """Lets go of all that a run holds that has failed: what first called its loss refers to the run."""
    run.watch = None
    run.record = run.evidence = None
    run.inputs, run.targets, run.outputs = (), (), {}
    for rank in run.ranks:
        if rank.host is not None:
            rank.host.close()  # before what it moves is freed
        rank.saved.clear()
        rank.waiting.clear()
        rank.handed.clear()
        rank.taken = []


def _variables_set(variables: Sequence[Context]) -> list[str]:
    own, of_torch = copy_context(), variables_of_torch()
    theirs = (pair for context in variables for pair in context.items())
    fresh = [variable for variable, value in theirs if own.get(variable, ABSENT) is not value]
    names = [variable.name for variable in fresh if variable not in of_torch and not variable.name.startswith(OTHERS)]
    return [SETS_VARIABLES.format(names=", ".join(dict.fromkeys(names)))] if names else []


INTERRUPTED = "the mini-batch was interrupted; .grad may have a part of its sums: zero_grad() before the next step"
LEFT = (
    "ranks went on with a mini-batch that was interrupted twice, and .grad has something of it, which may have come "
    "behind a zero_grad(): call that now, and then step() again"
)
ABSENT = object()
OTHERS = ("decimal_context", "torch.")  # how names begin of what Python and torch's compiler set by themselves
SETS_VARIABLES = (
    "layers set the context variables {names}, and layers of other partitions do not see that, nor which micro-batch "
    "it was for; hand it on as part of the value instead"
)
