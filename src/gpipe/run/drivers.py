"""Turn the crank: `lockstep` walks one legal order in the calling thread, `RankThreads` gives each rank a thread.

Threads are made at the first run and kept. They know their queue of jobs and nothing else, so a pipe that is dropped
can be collected, and its threads end.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import torch

from gpipe.plan.action import Kind
from gpipe.plan.program import Program
from gpipe.run.recorder import Recorder
from gpipe.run.steps import Part
from gpipe.run.transport import Cancelled, Transport
from gpipe.run.worker import Step, Worker

PHASES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.SEND: "send",
    Kind.RECEIVE: "receive",
    Kind.REDUCE: "reduction over replicas",
    Kind.TIE: "summation of shared gradients",
    Kind.COMMIT: "commit of BatchNorm statistics",
}


def lockstep(part: Part, workers: Sequence[Worker], recorder: Recorder | None = None) -> None:
    """Runs all rows in the calling thread, in one legal order: what a debugger wants to see."""
    for step in part.steps:
        worker = workers[step.rank]
        try:
            with worker.lane.enter():
                _do(worker, step, recorder)
        except BaseException as error:
            error.add_note(describe(worker, part.program, step.at, error))
            raise


def walk(worker: Worker, part: Part, transport: Transport, recorder: Recorder | None) -> None:
    """Does one rank's row."""
    at = 0
    try:
        with worker.lane.enter():
            for step in part.rows[worker.rank]:
                at = step.at
                if transport.cancelled:
                    raise Cancelled
                _do(worker, step, recorder)
    except Cancelled:
        raise
    except BaseException as error:
        error.add_note(describe(worker, part.program, at, error))
        raise


def _do(worker: Worker, step: Step, recorder: Recorder | None) -> None:
    if recorder is not None:
        recorder.do(worker, step)
        return
    if step.takes:
        worker.take(step)
    step.work(worker, step)


def describe(worker: Worker, program: Program, at: int, error: BaseException) -> str:
    """The note on an exception: where in the pipeline it happened."""
    action = program.rows[worker.rank][at]
    layer = worker.layer_of(action, error)
    where = [f"rank {worker.rank}", f"stage {action.stage}", *([layer] if layer else [])]
    return (
        f"in the {PHASES[action.kind]} of micro-batch {action.micro_batch}, {', '.join(where)}, "
        f"action {at + 1} of {len(program.rows[worker.rank])}:\n    {program.around(worker.rank, at)}"
    )


class RankThreads:
    """A thread for each rank, made when first needed."""

    def __init__(self, intra_op_threads: int) -> None:
        self.intra_op_threads = intra_op_threads
        self._jobs: list[SimpleQueue[Callable[[], None] | None]] = []
        self._stop: Callable[[], object] | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def run(self, jobs: Sequence[Callable[[], None]], cancel: Callable[[], None]) -> None:
        """Runs one job in each thread, and sleeps until all are done.

        Raises:
            BaseException: Whatever a job raised first; the others are cancelled before.
        """
        results: SimpleQueue[BaseException | None] = SimpleQueue()
        try:
            self._hand_out([partial(_report, job, results) for job in jobs])
            failure = _collect(results, len(jobs), cancel)
        except BaseException:  # a Ctrl-C where none was awaited
            cancel()
            raise
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame

    def _hand_out(self, jobs: Sequence[Callable[[], None]]) -> None:
        if self._pid != os.getpid():  # forked, perhaps while another thread had the lock
            self._lock = threading.Lock()
        with self._lock:  # two callers at once: every rank must get their jobs in one order
            self._start(len(jobs))
            for queue, job in zip(self._jobs, jobs, strict=False):
                queue.put(job)

    def _start(self, ranks: int) -> None:
        if self._pid != os.getpid():  # forked: the threads stayed behind
            self._jobs, self._pid = [], os.getpid()
            self._stop = weakref.finalize(self, _stop, self._jobs, self._pid)
        fresh = [SimpleQueue[Callable[[], None] | None]() for _ in range(ranks - len(self._jobs))]
        if not fresh:
            return
        ready: SimpleQueue[None] = SimpleQueue()
        own = torch.get_num_threads()
        for queue in fresh:
            target = partial(_serve, queue, self.intra_op_threads, ready)
            threading.Thread(target=target, name=f"gpipe rank {len(self._jobs)}", daemon=True).start()
            self._jobs.append(queue)
            ready.get()
        torch.set_num_threads(own)  # a rank thread's number is also the default of threads to come

    def close(self) -> None:
        """Ends the threads; the next run makes new ones."""
        if self._stop is not None:
            self._stop()
        self._pid = 0


def _stop(jobs: list[SimpleQueue[Callable[[], None] | None]], pid: int) -> None:
    if os.getpid() == pid:
        for queue in jobs:
            queue.put(None)


def _serve(jobs: SimpleQueue[Callable[[], None] | None], intra_op_threads: int, ready: SimpleQueue[None]) -> None:
    torch.set_num_threads(intra_op_threads)
    ready.put(None)
    while (job := jobs.get()) is not None:
        job()
        del job  # and with it the run


def _report(job: Callable[[], None], results: SimpleQueue[BaseException | None]) -> None:
    try:
        job()
    except BaseException as error:  # handed to the calling thread, whatever it is
        results.put(error)
    else:
        results.put(None)


def _collect(
    results: SimpleQueue[BaseException | None], jobs: int, cancel: Callable[[], None]
) -> BaseException | None:
    """Waits for all jobs; the first failure cancels the rest. A second Ctrl-C waits no longer."""
    failure: BaseException | None = None
    interrupted = False
    while jobs:
        try:
            error = results.get()
        except KeyboardInterrupt as interrupt:
            cancel()
            failure = interrupt
            if interrupted:
                break
            interrupted = True
            continue
        jobs -= 1
        if error is not None and not isinstance(error, Cancelled) and failure is None:
            failure = error
            cancel()
    return failure
