"""A thread for each rank, which knows its queue of jobs and nothing else.

Threads are made at the first run and kept. A pipe that is dropped can be collected, and its threads end; so they do
before the interpreter does.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from gpipe._torch.dispatcher import forget_stashed
from gpipe.stages.messages import Cancelled

Task: TypeAlias = tuple[Callable[[], None], SimpleQueue[BaseException | None]]
"""A job, and where to say that it is done."""
NAME = "gpipe rank"
WITHIN = (
    "the pipe is called by one of its own rank threads, which would wait for itself: by a layer, or in its backward "
    "by torch.utils.checkpoint around the pipe. A pipe recomputes by itself: leave that out, and give remat="
)
AT_EXIT = 2.0
"""Seconds that the interpreter waits for threads at its end: one that it ends inside of C++ aborts the process."""


class RankThreads:
    """A thread for each rank, made when first needed."""

    def __init__(self, intra_op_threads: int) -> None:
        self.intra_op_threads = intra_op_threads
        self._jobs: list[SimpleQueue[Task | None]] = []
        self._threads: list[threading.Thread] = []
        self._stop: weakref.finalize[Any, RankThreads] | None = None
        self._pid = 0
        self._home, self._lock = os.getpid(), threading.Lock()

    def run(self, jobs: Sequence[Callable[[], None]], cancel: Callable[[], None]) -> None:
        """Runs one job in each thread, and sleeps until all are done; raises what a job raised first."""
        if threading.current_thread() in self._threads:
            raise RuntimeError(WITHIN)
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
            self._jobs, self._threads, self._pid = [], [], os.getpid()
            at_exit = partial(_end, self._jobs, self._threads, self._pid)
            atexit.register(at_exit)
            self._stop = weakref.finalize(self, _stop, self._jobs, self._pid, at_exit)
            self._stop.atexit = False  # then all threads are waited for
        fresh = [SimpleQueue[Task | None]() for _ in range(ranks - len(self._jobs))]
        if not fresh:
            return
        ready: SimpleQueue[None] = SimpleQueue()
        own = torch.get_num_threads()
        for queue in fresh:
            target = partial(_serve, queue, self.intra_op_threads, ready)
            thread = threading.Thread(target=target, name=f"{NAME} {len(self._jobs)}", daemon=True)
            thread.start()
            self._jobs.append(queue)
            self._threads.append(thread)
            ready.get()
        torch.set_num_threads(own)  # a rank thread's number is also the default of threads to come

    def close(self) -> None:
        """Ends the threads; the next run makes new ones."""
        if self._stop is not None:
            self._stop()
        self._pid = 0


def _wait_for_those_that_end() -> None:
    """Waits for rank threads that were told to end: an interpreter that ends under one of them aborts."""
    until = time.monotonic() + AT_EXIT
    for thread in threading.enumerate():
        if thread.name.startswith(NAME) and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


atexit.register(_wait_for_those_that_end)  # before all others, and so after them


def _stop(jobs: Sequence[SimpleQueue[Task | None]], pid: int, at_exit: Callable[[], None]) -> None:
    """Has threads end that have nothing to do any more, whoever drops them."""
    atexit.unregister(at_exit)
    if os.getpid() == pid:
        for queue in jobs:
            queue.put(None)


def _end(jobs: Sequence[SimpleQueue[Task | None]], threads: Sequence[threading.Thread], pid: int) -> None:
    """Has threads end, and waits for them."""
    if os.getpid() == pid:
        for queue in jobs:
            queue.put(None)
        until = time.monotonic() + AT_EXIT
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


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
    forget_stashed()


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
