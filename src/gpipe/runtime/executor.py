"""Performs the actions of a mini-batch: forwards and backwards together, or one half of them.

A `step` is one pass over the table. A call is two, its forward and its backward, with anything between them. In a
pass each rank performs its actions in their order, all ranks in the calling thread or each in its own.

Three ranks, four micro-batches, fill-drain; F forwards, B backwards, each of a micro-batch:

    rank 0   F0 F1 F2 F3          B0 B1 B2 B3
    rank 1      F0 F1 F2 F3    B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3

Before an action a rank receives what the action needs. After it, the rank sends the results to other ranks.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial

from gpipe._torch.modes import as_rank, intra_op_threads
from gpipe.runtime.actions import WORK
from gpipe.runtime.compiled_table import CompiledAction, CompiledTable
from gpipe.runtime.feature import Feature, Hooks
from gpipe.runtime.run import Rank, Run, call_loss_fn
from gpipe.schedule.action import OVERLAPPED, Kind
from gpipe.stages.messages import Cancelled
from gpipe.stages.rng import RankScope, unseeded
from gpipe.stages.stage import StageRun
from gpipe.stages.thread_state import ThreadState
from gpipe.stages.tree import tensors_in


def run_step(run: Run) -> None:
    """Performs the whole table."""
    with run.stages.threads.turn():
        _prepare(run)
        _run_table(run, run.compiled.whole)
        _finish(run)


def run_forward(run: Run) -> None:
    """Performs the forward half, and keeps what the backward half needs."""
    with run.stages.threads.turn():
        _prepare(run)
        _run_table(run, run.compiled.forward)


def run_backward(run: Run) -> None:
    """Performs the backward half."""
    # The thread of a device in autograd must not wait for a step of another caller, which needs that thread.
    with nullcontext() if run.stages.queues else run.stages.threads.turn():
        _run_table(run, run.compiled.backward)
        _finish(run)


def begin_ranks(run: Run, features: Sequence[Feature]) -> None:
    """Makes the ranks of this process for a mini-batch with these features."""
    run.features, run.hooks = features, Hooks(features)
    run.work = work = {**WORK}
    for feature in features:
        feature.perform_actions(run, work)
    run.ranks = [
        Rank(number, stream, {stage.index: StageRun(stage) for stage in run.stages.stages_of[number]})
        for number, stream in run.stages.streams.items()
    ]


def run_rank(run: Run, rank: Rank, table: CompiledTable) -> None:
    """Performs the actions of one rank, in its own thread or process."""
    context, at = run.context, 0
    started: dict[int, CompiledAction] = {}  # by stage
    try:
        scope = RankScope(run.seed, run.step_number)
        with run.thread_state.rank_thread(), as_rank(), rank.stream.enter(), scope as rank.scope:
            for task in table.rows[rank.rank]:
                at = task.at
                if context.cancelled:
                    raise Cancelled
                context.reach(at)
                if task.stage in started:
                    perform(run, rank, started.pop(task.stage))
                if task.action.kind in OVERLAPPED:
                    context.begin(task.action)
                    started[task.stage] = task
                else:
                    perform(run, rank, task)
            for task in started.values():
                at = task.at
                perform(run, rank, task)
    except BaseException as error:
        run.hooks.note_error(run, rank, table, at, error)
        raise


def lockstep(run: Run, table: CompiledTable) -> None:
    """Performs the actions of all ranks in the calling thread, in one legal order: for debuggers."""
    with run.thread_state.rank_thread(), RankScope(run.seed, run.step_number) as scope:
        for rank in run.ranks:
            rank.scope = scope
        for task in table.actions:
            rank = run.ranks[task.rank]
            try:
                with rank.stream.enter():
                    perform(run, rank, task)
            except BaseException as error:
                run.hooks.note_error(run, rank, table, task.at, error)
                raise


def perform(run: Run, rank: Rank, task: CompiledAction) -> None:
    """Performs one action."""
    if task.receives:
        run.work[Kind.RECEIVE](run, rank, task)
    run.work[task.action.kind](run, rank, task)
    rank.stream.keep_pace()


def _prepare(run: Run) -> None:
    run.compile()
    begin_ranks(run, run.choose_features(run))


def _run_table(run: Run, table: CompiledTable) -> None:
    """Performs the actions of this process in a table, or in half of one."""
    stages, is_backward = run.stages, table is run.compiled.backward
    # On a device, the backward of a call is in the thread of the device in autograd: other threads would wait for it.
    in_threads = stages.threaded and not (is_backward and stages.queues)
    _begin(run, backward=is_backward)
    if in_threads:
        ThreadState.here().refuse_unsupported(  # of a backward, too
            " in the calling thread and would not see what the rank threads do; leave it outside, or use "
            "driver='lockstep', which runs in the calling thread"
        )
    try:
        run.aliases.put_in_place()
        threads = intra_op_threads(stages.intra_op_threads)
        with run.thread_state.without_kept_casts(), unseeded(stages.devices), threads:
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


def _begin(run: Run, *, backward: bool) -> None:
    """Follows what others have done to the layers since, and begins the work of each rank."""
    if run.trains:
        run.stages.threads.follow_interrupted(layer.module for stage in run.stages.own for layer in stage.layers)
    given = [*run.targets, *(run.output_gradients if backward else [crossing.value for crossing in run.inputs])]
    devices = {tensor.device for tensor in tensors_in(given)}
    for stage in () if backward else run.stages.own:
        stage.begin()
    for rank in run.ranks:
        rank.stream.begin(devices)


def _run_ranks(run: Run, table: CompiledTable, *, in_threads: bool) -> None:
    """Performs the actions of each rank in its own thread, or all in this one."""
    with run.context.running(table, run.aliases), run.hooks.around_pass(run, table):
        if in_threads:
            jobs = [partial(copy_context().run, run_rank, run, rank, table) for rank in run.ranks]
            run.stages.threads.run(jobs, run.context.cancel)
        elif run.stages.row is None:
            lockstep(run, table)
        else:
            run_rank(run, run.ranks[0], table)


def _finish(run: Run) -> None:
    """Adds up the gradients of shared weights, unless the table does, and checks that nothing is left."""
    if run.trains and run.stages.shared and Kind.TIE not in run.compiled.kinds:
        run.aliases.add_up()
    for rank in run.ranks:
        if rank.states or rank.local_messages:
            raise AssertionError(f"the store of rank {rank.rank} is not empty after the step; this is a bug in gpipe")


def _clear(run: Run) -> None:
    """Drops everything that a failed run keeps: the traceback of its error refers to it."""
    run.features, run.hooks, run.work = (), Hooks(), {}
    run.inputs, run.targets, run.outputs = (), (), {}
    run.call_loss = call_loss_fn
    for rank in run.ranks:
        rank.states.clear()
        rank.local_messages.clear()
        rank.inbox, rank.outbox = [], ()


INTERRUPTED = "the mini-batch was interrupted; .grad may have a part of its sums: zero_grad() before the next step"
