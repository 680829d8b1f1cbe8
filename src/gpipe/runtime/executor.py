"""Runs the program of a mini-batch: each rank performs its actions in order.

A `step` runs the whole program. A call runs its forward half, and `backward()` runs its backward half later. All
ranks run in the calling thread, or each rank runs in its own thread or process.

With three ranks, four micro-batches and the schedule "gpipe", the program is as follows. F is the forward pass of one
micro-batch, and B is the backward pass::

    rank 0   F0 F1 F2 F3          B0 B1 B2 B3
    rank 1      F0 F1 F2 F3    B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3

Before an action, a rank receives the messages that the action needs. After it, the rank sends the results.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from operator import attrgetter

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

UNSEEN_BY_THREADS = (
    "{modes} is active in the calling thread, but has no effect in rank threads. Leave the mode, or use "
    "driver='lockstep', which runs in the calling thread. [mode-not-in-threads]"
)
INTERRUPTED = (
    "The mini-batch was interrupted, and .grad may hold partial sums. Call zero_grad() before the next step."
)


def run_step(run: Run) -> None:
    """Runs the whole program of a mini-batch."""
    with run.stages.threads.turn():
        run.compile()
        begin_ranks(run, run.choose_features(run))
        _run_table(run, run.compiled.whole)
        _finish(run)


def run_forward_half(run: Run) -> None:
    """Runs the forward half of a program. The run keeps the state that the backward half needs."""
    with run.stages.threads.turn():
        run.compile()
        begin_ranks(run, run.choose_features(run))
        _run_table(run, run.compiled.forward)


def run_backward_half(run: Run) -> None:
    """Runs the backward half of a program."""
    # Do not block autograd's device thread here: the step of a different caller may need it to finish.
    with nullcontext() if run.stages.queues else run.stages.threads.turn():
        _run_table(run, run.compiled.backward)
        _finish(run)


def begin_ranks(run: Run, features: Sequence[Feature]) -> None:
    """Creates the ranks of this process for a mini-batch with these features."""
    run.features, run.hooks = features, Hooks(features)
    run.work = work = {**WORK}
    for feature in features:
        feature.wrap_actions(run, work)
    run.ranks = [
        Rank(number, stream, {stage.index: StageRun(stage) for stage in run.stages.stages_of[number]})
        for number, stream in run.stages.streams.items()
    ]


def run_rank(run: Run, rank: Rank, table: CompiledTable) -> None:
    """Performs the actions of one rank, in its own thread or process."""
    context, position = run.context, 0
    started: dict[int, CompiledAction] = {}  # overlapped actions that have not ended, by stage
    try:
        scope = RankScope(run.seed, run.step_number)
        with run.thread_state.rank_thread(), as_rank(), rank.stream.enter(), scope as rank.scope:
            for task in table.rows[rank.rank]:
                position = task.position
                if context.cancelled:
                    raise Cancelled
                context.reach(position)
                if task.stage in started:
                    perform(run, rank, started.pop(task.stage))
                if task.action.kind in OVERLAPPED:
                    context.start_exchange(task.action)
                    started[task.stage] = task
                else:
                    perform(run, rank, task)
            for task in started.values():
                position = task.position
                perform(run, rank, task)
    except BaseException as error:
        run.hooks.note_error(run, rank, table, position, error)
        raise


def lockstep(run: Run, table: CompiledTable) -> None:
    """Performs the actions of all ranks in the calling thread, in one legal order, so debuggers can stop in it."""
    with run.thread_state.rank_thread(), RankScope(run.seed, run.step_number) as scope:
        for rank in run.ranks:
            rank.scope = scope
        for task in table.actions:
            rank = run.ranks[task.rank]
            try:
                with rank.stream.enter():
                    perform(run, rank, task)
            except BaseException as error:
                run.hooks.note_error(run, rank, table, task.position, error)
                raise


def perform(run: Run, rank: Rank, task: CompiledAction) -> None:
    """Performs one action: receives its messages, then calls the function for its kind."""
    if task.receives:
        run.work[Kind.RECEIVE](run, rank, task)
    run.work[task.action.kind](run, rank, task)
    rank.stream.limit_queue()


def _run_table(run: Run, table: CompiledTable) -> None:
    """Performs the actions of this process in a program, or in its forward or backward half."""
    stages, is_backward = run.stages, table is run.compiled.backward
    # On a GPU, `backward()` of a call runs in autograd's device thread, and rank threads would wait for that thread.
    in_threads = stages.threaded and not (is_backward and stages.queues)
    if run.trains:
        stages.threads.check_interrupted(stages.layers)
    inputs = run.output_gradients if is_backward else map(attrgetter("value"), run.inputs)
    devices = set(map(attrgetter("device"), tensors_in([*run.targets, *inputs])))
    for stage in () if is_backward else stages.local:
        stage.begin()
    for rank in run.ranks:
        rank.stream.begin(devices)
    if in_threads:  # `backward()` may be called under different modes than the forward pass, so they are read again.
        ThreadState.here().refuse_unsupported(UNSEEN_BY_THREADS)
    try:
        run.aliases.put_in_place()
        threads = intra_op_threads(stages.intra_op_threads)
        with (
            run.thread_state.without_kept_casts(),
            unseeded(stages.devices),
            threads,
            run.context.running(table, run.aliases),
            run.hooks.around_pass(run, table),
        ):
            if in_threads:
                jobs = [partial(copy_context().run, run_rank, run, rank, table) for rank in run.ranks]
                stages.threads.run(jobs, run.context.cancel)
            elif stages.pp_rank is None:
                lockstep(run, table)
            else:
                run_rank(run, run.ranks[0], table)
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


def _finish(run: Run) -> None:
    """Sums the gradients of shared weights, unless the program sums them. Checks that no rank keeps any state."""
    if run.trains and run.stages.shared and Kind.TIE not in run.compiled.kinds:
        run.aliases.add_up()
    for rank in run.ranks:
        if rank.states or rank.local_messages:
            raise AssertionError(f"Rank {rank.rank} still keeps state after the step. This is a bug in gpipe.")


def _clear(run: Run) -> None:
    """Frees all tensors that a failed run keeps, because the traceback of the error refers to the run."""
    run.features, run.hooks, run.work = (), Hooks(), {}
    run.inputs, run.targets, run.outputs = (), (), {}
    run.call_loss = call_loss_fn
    for rank in run.ranks:
        rank.states.clear()
        rank.local_messages.clear()
        rank.inbox, rank.outbox = [], ()
