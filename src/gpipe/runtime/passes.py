"""The passes of a mini-batch through the stages: forwards and backwards together, or first all of the one.

A `step` is one pass. A call is two, its forward and its backward, and whatever else comes between them.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from contextvars import Context, copy_context
from functools import partial

import torch

from gpipe._torch.modes import casts_apart, intra_op_threads
from gpipe.runtime.loop import lockstep, run_rank
from gpipe.runtime.run import Run
from gpipe.runtime.steps import CompiledRows
from gpipe.runtime.thread_state import ThreadState
from gpipe.runtime.threads import RankThreads
from gpipe.stages.layout import is_sharded
from gpipe.stages.losses import call_loss
from gpipe.stages.recompute_check import RecomputeError, recompute_error
from gpipe.stages.rng import unseeded
from gpipe.stages.side_effects import SharedBufferCheck
from gpipe.stages.tree import version


def run_step(run: Run) -> None:
    """Runs the whole table."""
    run.prepare()
    _go(run, run.compiled.whole)
    _finish(run)


def run_forward(run: Run) -> None:
    """Runs the forward half; what the backward half needs is kept.

    Raises:
        ValueError: A mode is active that a recompute would not see.
    """
    run.prepare()
    if run.thread_state.unsupported and any(ends.recomputed for ends in run.compiled.connections):
        raise ValueError(
            f"{', '.join(run.thread_state.unsupported)} is active, and would not see what a backward recomputes "
            f"of this call; use step(), or remat='never'"
        )
    _go(run, run.compiled.forward)
    run.versions = _find_versions(run)  # behind it: lazy modules come by theirs in it


def run_backward(run: Run) -> None:
    """Runs the backward half.

    On CUDA it runs in this thread: it is autograd's thread of the device, and backwards in other threads would
    wait for it for ever.

    Raises:
        RuntimeError: A parameter, or whether a module trains, has changed since the forward.
    """
    if _find_versions(run) != run.versions:
        raise RuntimeError(
            "a parameter was changed or replaced, or train() or eval() was called, between a forward and its "
            "backward, which would recompute with the new value; call backward first, or use remat='never'"
        )
    _go(run, run.compiled.backward, backward=True)
    _finish(run)


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
        if rank.saved or rank.handed:
            raise AssertionError(f"the store of rank {rank.rank} is not empty after the step; this is a bug in gpipe")


def _clear(run: Run) -> None:
    """Lets go of all that a run holds that has failed: what first called its loss refers to the run."""
    run.call_loss = call_loss
    for rank in run.ranks:
        rank.saved.clear()
        rank.handed.clear()
        rank.taken = []


def _go(run: Run, rows: CompiledRows, *, backward: bool = False) -> None:
    """Runs the table, or half of it."""
    engine = run.engine
    here = not engine.threaded or (backward and any(device.type == "cuda" for device in engine.devices))
    threads = None if here else engine.threads
    _begin_pass(run, backward)
    if run.recorder is not None:
        run.recorder.begin(engine.streams)
    if threads is not None:
        ThreadState.here().refuse_unsupported()  # of a backward, too
    buffers = SharedBufferCheck(engine.shared_buffers) if engine.shared_buffers else None
    aliased = run.aliases.in_place() if engine.shared else nullcontext()
    if run.thread_state.autocasts:  # it begins and ends with no casts kept, as ThreadState says
        torch.clear_autocast_cache()
    try:
        with aliased, unseeded(engine.devices):
            _drive(run, rows, threads)
        if buffers:
            buffers.check()
    except BaseException as error:
        _clear(run)
        if buffers and isinstance(error, RecomputeError):
            buffers.check()  # knows more, perhaps
        raise
    finally:
        if run.thread_state.autocasts:
            torch.clear_autocast_cache()
    _check_recomputes(run)
    for rank in run.ranks:
        rank.stream.end()
    if run.recorder is not None:
        run.recorder.end()


def _begin_pass(run: Run, backward: bool) -> None:
    """Follows what others have done to the layers since."""
    for rank in run.ranks:
        for at, stage in rank.stages.items():
            recomputed = bool(run.connections[at].recomputed)
            if recomputed or not backward:
                stage.stage.begin()
            if recomputed or run.examines:
                stage.buffers.find()
        for check in rank.checks.values():
            check.begin()
        rank.stream.begin()


def _drive(run: Run, rows: CompiledRows, threads: RankThreads | None) -> None:
    """Has the ranks of this process do their actions: in threads, or all in the calling one."""
    modes, context = run.thread_state, run.context
    with intra_op_threads(run.engine.intra_op_threads), context.running(rows, run.aliases):
        if threads is not None:
            variables = [copy_context() for _ in run.ranks]
            jobs = [
                partial(own.run, run_rank, run, rank, rows) for own, rank in zip(variables, run.ranks, strict=True)
            ]
            with casts_apart():
                threads.run(jobs, context.cancel)
            if run.examines:
                run.findings += _variables_set(variables)
        elif run.engine.row is None:
            with modes.rank_thread():
                lockstep(run, rows)
        else:
            for rank in run.ranks:
                run_rank(run, rank, rows)
    for rank in run.ranks:
        if rank.commits:
            with rank.stream.enter():
                context.share({stage: rank.deferred[stage] for stage in sorted(rank.commits)})


def _check_recomputes(run: Run) -> None:
    """Looks whether recomputes on a GPU gave what their forwards did.

    Raises:
        RecomputeError: One did not.
    """
    for rank in run.ranks:
        if rank.doubts:
            with rank.stream.enter():
                differs = bool(torch.stack(rank.doubts).any())
            if differs:
                raise recompute_error(f"a layer of {run.context.name(rank.rank)}")


def _variables_set(variables: Sequence[Context]) -> Iterator[str]:
    """Tells of the context variables that layers have set."""
    own = copy_context()
    names = {
        variable.name: None
        for context in variables
        for variable, value in context.items()
        if own.get(variable, ABSENT) is not value and variable.name not in OF_PYTHON
    }
    if names:
        yield (
            f"layers set the context variables {', '.join(names)}, and layers of other partitions do not see that, "
            f"nor which micro-batch it was for; hand it on as part of the value instead"
        )


ABSENT = object()
OF_PYTHON = {"decimal_context"}
"""What Python sets by itself."""
