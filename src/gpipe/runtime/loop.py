"""The loop: every rank's row, step by step, all by the calling thread or each by its own."""

from collections.abc import Sequence

from gpipe.errors import RemoteError
from gpipe.runtime.notes import add_note
from gpipe.runtime.recorder import Recorder
from gpipe.runtime.steps import CompiledRows, Step
from gpipe.runtime.worker import Worker
from gpipe.stages.messages import Cancelled


def lockstep(rows: CompiledRows, workers: Sequence[Worker], recorder: Recorder | None = None) -> None:
    """Runs all rows in the calling thread, in one legal order: what a debugger wants to see."""
    for step in rows.steps:
        worker = workers[step.rank]
        try:
            with worker.stream.enter():
                _do(worker, step, recorder)
        except BaseException as error:
            add_note(error, worker, rows.program, step.at)
            raise


def walk(worker: Worker, rows: CompiledRows, recorder: Recorder | None = None) -> None:
    """Runs the row of one rank."""
    transport, at = worker.others.transport, 0
    try:
        with worker.stream.enter():
            for step in rows.rows[worker.rank]:
                at = step.at
                if transport.cancelled:
                    raise Cancelled
                transport.reach(at)
                _do(worker, step, recorder)
    except Cancelled:
        raise
    except BaseException as error:
        if not (isinstance(error, RemoteError) and error.heard):
            add_note(error, worker, rows.program, at)
        raise


def _do(worker: Worker, step: Step, recorder: Recorder | None) -> None:
    if recorder is not None:
        recorder.do(worker, step)
        return
    if step.takes:
        worker.take(step)
    worker.do(step)
