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
from typing import TypeAlias

import torch

from gpipe.errors import RemoteError
from gpipe.layers.stage import LOSS
from gpipe.plan.action import Kind
from gpipe.plan.program import Program
from gpipe.runtime.recorder import Recorder
from gpipe.runtime.rows import CompiledRows
from gpipe.runtime.worker import Step, Worker
from gpipe.values.messages import Cancelled, Transport

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

ONE_VALUE = "Expected more than 1 value per channel"  # how torch's normalizations begin to refuse
WRONG_NUMBER = ("missing ", "takes ")  # so Python goes on where arguments are too few or too many
ONE_VALUE_A_LAYER = (
    "\na layer is given one value, what the layer before returned, also where that is a tuple: let forward take one "
    "argument and unpack it there, as in def forward(self, both): x, mask = both"
)
NOT_TENSORS = {
    "NoneType": "does its forward lack a return?",
    "tuple": "a layer is given all of it, as of an LSTM or an attention; put one between that takes the tensor out",
    "dict": "a layer is given all of it; put one between that takes the tensor out",
}
TWO_VALUES_A_LOSS = "\nthe loss is called as loss_fn(output, target), with what one micro-batch gave and its targets"
OF_A_THREAD = "'_thread._local' object has no attribute"
NOT_OF_THIS_THREAD = (
    "\na threading.local has what each thread has set there, and rank threads have set nothing: use a "
    "contextvars.ContextVar, which they see as the caller has it, or driver='lockstep'"
)
TOO_FEW_VALUES = (
    "\nthis micro-batch is too small to normalize: use fewer micro-batches or a larger mini-batch, "
    "and leave out a last mini-batch that is smaller (drop_last=True)"
)


def lockstep(part: CompiledRows, workers: Sequence[Worker], recorder: Recorder | None = None) -> None:
    """Runs all rows in the calling thread, in one legal order: what a debugger wants to see."""
    for step in part.steps:
        worker = workers[step.rank]
        try:
            with worker.stream.enter():
                _do(worker, step, recorder)
        except BaseException as error:
            _add_note(error, worker, part.program, step.at)
            raise


def walk(worker: Worker, part: CompiledRows, transport: Transport, recorder: Recorder | None) -> None:
    """Does one rank's row."""
    at = 0
    try:
        with worker.stream.enter():
            for step in part.rows[worker.rank]:
                at = step.at
                if transport.cancelled:
                    raise Cancelled
                transport.reach(at)
                _do(worker, step, recorder)
    except Cancelled:
        raise
    except BaseException as error:
        if not (isinstance(error, RemoteError) and error.heard):
            _add_note(error, worker, part.program, at)
        raise


def _do(worker: Worker, step: Step, recorder: Recorder | None) -> None:
    if recorder is not None:
        recorder.do(worker, step)
        return
    if step.takes:
        worker.take(step)
    step.work(worker, step)


def _add_note(error: BaseException, worker: Worker, program: Program, at: int) -> None:
    if not isinstance(getattr(error, "__notes__", []), list):
        del error.__notes__  # something of the user's own, where Python wants a list
    error.add_note(describe(worker, program, at, error))


def describe(worker: Worker, program: Program, at: int, error: BaseException) -> str:
    """The note on an exception: where in the pipeline it happened."""
    layer = worker.layer_of(program.rows[worker.rank][at], error)
    return f"{in_words(program, worker.rank, at, layer, worker.name)}{advice(error, layer)}"


def advice(error: BaseException, layer: str | None) -> str:
    """What to do about an exception of Python's or torch's whose text does not say it of a pipe."""
    said = error.args[0] if error.args else ""  # an exception's own text may be code that raises
    if not isinstance(said, str):
        return ""
    if said.startswith(ONE_VALUE):
        return TOO_FEW_VALUES
    if said.startswith(OF_A_THREAD):
        return NOT_OF_THIS_THREAD
    for kind, remedy in NOT_TENSORS.items():
        if said.endswith(f"must be Tensor, not {kind}") and layer not in (None, LOSS):
            return f"\nif it is what the layer before returned: {remedy}"
    called, _, rest = said.partition("() ")
    if type(error) is not TypeError or not rest.startswith(WRONG_NUMBER):
        return ""
    owner, _, method = called.rpartition(".")
    if method == "forward" and layer is not None and layer.endswith(f": {owner.rpartition('.')[2]})"):
        return ONE_VALUE_A_LAYER
    return TWO_VALUES_A_LOSS if layer == LOSS else ""


def in_words(program: Program, rank: int, at: int, layer: str | None, name: str) -> str:
    """A place in the row of a rank, with the row around it."""
    row = program.rows[rank]
    action = row[at]
    computes_loss = layer == LOSS and action.kind in (Kind.FORWARD, Kind.RECOMPUTE)
    phase = "loss" if computes_loss else PHASES[action.kind]
    what = phase + ("" if action.micro_batch is None else f" of micro-batch {action.micro_batch}")
    where = [name, f"stage {action.stage}", *([layer] if layer and not computes_loss else [])]
    return f"in the {what}, {', '.join(where)}, action {at + 1} of {len(row)}:\n    {program.around(rank, at)}"


Task: TypeAlias = tuple[Callable[[], None], SimpleQueue[BaseException | None]]
"""A job, and where to say that it is done."""


class RankThreads:
    """A thread for each rank, made when first needed."""

    def __init__(self, intra_op_threads: int) -> None:
        self.intra_op_threads = intra_op_threads
        self._jobs: list[SimpleQueue[Task | None]] = []
        self._stop: Callable[[], object] | None = None
        self._pid = 0
        self._home, self._lock = os.getpid(), threading.Lock()

    def run(self, jobs: Sequence[Callable[[], None]], cancel: Callable[[], None]) -> None:
        """Runs one job in each thread, and sleeps until all are done.

        Raises:
            BaseException: Whatever a job raised first; the others are cancelled before.
        """
        results: SimpleQueue[BaseException | None] = SimpleQueue()
        try:
            self._hand_out([(job, results) for job in jobs])
            failure = _collect(results, len(jobs), cancel)
        except BaseException:  # a Ctrl-C where none was awaited
            cancel()
            raise
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame

    def _hand_out(self, tasks: Sequence[Task]) -> None:
        if self._home != os.getpid():  # forked, perhaps while another thread had the lock
            self._home, self._lock = os.getpid(), threading.Lock()
        with self._lock:  # two callers at once: every rank must get their jobs in one order
            self._start(len(tasks))
            for queue, task in zip(self._jobs, tasks, strict=False):
                queue.put(task)

    def _start(self, ranks: int) -> None:
        if self._pid != os.getpid():  # forked: the threads stayed behind
            self._jobs, self._pid = [], os.getpid()
            self._stop = weakref.finalize(self, _stop, self._jobs, self._pid)
        fresh = [SimpleQueue[Task | None]() for _ in range(ranks - len(self._jobs))]
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


def _stop(jobs: list[SimpleQueue[Task | None]], pid: int) -> None:
    if os.getpid() == pid:
        for queue in jobs:
            queue.put(None)


def _serve(jobs: SimpleQueue[Task | None], intra_op_threads: int, ready: SimpleQueue[None]) -> None:
    torch.get_num_threads()  # at its first use a thread takes on the global number: not after its own was set
    torch.set_num_threads(intra_op_threads)
    ready.put(None)
    while (task := jobs.get()) is not None:
        job, results = task
        failure = _failure(job)
        del task, job  # and with them the run, before its caller goes on
        results.put(failure)
        del failure


def _failure(job: Callable[[], None]) -> BaseException | None:
    """Does a job; what it raised is for the calling thread, whatever it is."""
    try:
        job()
    except BaseException as error:
        return error
    return None


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
