"""The loop: each rank does its actions in their order, all ranks in the calling thread or each in its own.

Three ranks, four micro-batches, fill-drain; F forwards, B backwards, each of a micro-batch:

    rank 0   F0 F1 F2 F3          B0 B1 B2 B3
    rank 1      F0 F1 F2 F3    B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3

Before it does an action, a rank receives what the action needs; behind it, it sends what others need of it.
"""

from gpipe._torch.modes import as_rank
from gpipe.errors import RemoteError
from gpipe.runtime.actions import WORK, receive
from gpipe.runtime.notes import add_note
from gpipe.runtime.run import Rank, Run
from gpipe.runtime.steps import CompiledRows, Step
from gpipe.stages.messages import Cancelled


def run_rank(run: Run, rank: Rank, rows: CompiledRows) -> None:
    """Does the actions of one rank, in its own thread or process."""
    context, at = run.context, 0
    try:
        with run.thread_state.rank_thread(), as_rank(), rank.stream.enter():
            for step in rows.rows[rank.rank]:
                at = step.at
                if context.cancelled:
                    raise Cancelled
                context.reach(at)
                do(run, rank, step)
    except Cancelled:
        raise
    except BaseException as error:
        if not (isinstance(error, RemoteError) and error.heard):
            add_note(error, run, rank, rows.program, at)
        raise


def lockstep(run: Run, rows: CompiledRows) -> None:
    """Does the actions of all ranks in the calling thread, in one legal order: what a debugger wants to see."""
    for step in rows.steps:
        rank = run.ranks[step.rank]
        try:
            with rank.stream.enter():
                do(run, rank, step)
        except BaseException as error:
            add_note(error, run, rank, rows.program, step.at)
            raise


def do(run: Run, rank: Rank, step: Step) -> None:
    """Does one action."""
    if run.recorder is not None:
        run.recorder.do(run, rank, step)
        return
    if step.takes:
        receive(run, rank, step)
    WORK[step.action.kind](run, rank, step)
