"""A thread for each rank.

Threads are made at the first run and kept. They refer only to their queues of jobs, so that a pipe can be collected.
They end then, and before the interpreter ends. A notebook keeps the pipe of a cell that runs again: its threads end
at the first run of the next pipe.

Note "Interrupts". Python raises KeyboardInterrupt (or the exception of another signal handler) only in the main
thread, after a call or between iterations of a loop. So an update that must not be interrupted is one call of a C
function, or assignments without calls. A result taken out of a queue may be lost; a result in a list is not.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch
from torch import nn

from gpipe.stages.messages import Cancelled

Task: TypeAlias = tuple[Callable[[], None], Callable[[], None], list[BaseException | None], SimpleQueue[None]]
"""A job, what cancels the others, what jobs have raised that are done, and what wakes who waits for them."""
NAME = "gpipe rank"
WITHIN = (
    "the pipe is called from within its own run, which would wait for itself: by a layer or a hook, where it "
    "generates by a processor of scores, or in its backward by torch.utils.checkpoint around the pipe. A pipe "
    "recomputes by itself: leave that out, and give remat="
)
AT_ONCE = (
    "a call of this pipe is under way already, in another thread or around this one: in a layer, a loss, or a "
    "function for reduction=. Over processes, call the pipe again after it has returned, in the same order in every "
    "process"
)
LEFT = (
    "ranks went on with a mini-batch that was interrupted twice, and .grad has something of it, which may have come "
    "behind a zero_grad(): call that now, and then step() again"
)
LOOK_SECONDS = 1.0  # a signal that comes as its thread is falling asleep does not wake it
AT_EXIT = 2.0  # seconds to wait for threads to end: one that the interpreter ends inside of C++ aborts the process


class RankThreads:
    """A thread for each rank, made when first needed."""

    def __init__(self, intra_op_threads: int) -> None:
        self.intra_op_threads = intra_op_threads
        self._is_new = True
        self.loops: Sequence[threading.Thread] = ()  # where it generates: those that its run waits for
        self.unlock()
        self.begin()
        _alive.add(self)

    def unlock(self) -> None:
        self._turn, self._lock = threading.RLock(), threading.Lock()
        self._runs, self._is_alone = 0, False
        self.left: Callable[[], None] | None = None  # waits for jobs that a second Ctrl-C has left at work
        self._in_backward: set[int] = set()  # the threads that are

    def begin(self) -> None:
        """Begins without threads, after they have ended, or in a forked process, which does not have them."""
        jobs, threads = list[SimpleQueue[Task | None]](), list[threading.Thread]()
        end = weakref.finalize(self, _tell_to_end, jobs)  # whoever drops them
        end.atexit = False  # then all threads are waited for
        self._jobs, self._threads, self._end = jobs, threads, end  # note "Interrupts"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lets the runs of several callers take turns, because modules hold aliases of shared weights in a run."""
        if threading.current_thread() in (*self._threads, *self.loops):
            raise RuntimeError(WITHIN)
        with self._turn:
            if self._runs > 1:  # in this thread; a loss may call its own pipe in lockstep, a layer does so for ever
                raise RuntimeError(WITHIN)
            self._runs += 1
            try:
                yield
            finally:
                self._runs -= 1

    def follow_interrupted(self, layers: Iterable[nn.Module]) -> None:
        """Waits for a mini-batch that was interrupted twice; rejects gradients that it may have left."""
        if self.left is not None:
            self.left()
            gradients = (weight.grad for layer in layers for weight in layer.parameters())
            if any(gradient is not None and gradient.to_dense().any() for gradient in gradients):
                raise RuntimeError(LEFT)
            self.left = None

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of a call: autograd may begin another in this thread, while it waits for a device."""
        me = threading.get_ident()
        if me in self._in_backward:
            raise RuntimeError(
                "the backward of another call of this pipe is under way: with ranks on several devices, autograd "
                "begins one while it waits in another, and gradients would be added up in another order each time. "
                "Give the inputs of both in one call, call backward for each output by itself, or run a process for "
                "each device"
            )
        self._in_backward.add(me)
        try:
            yield
        finally:
            self._in_backward.discard(me)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around a call over processes: rejects a second call before processes exchange anything for it."""
        if self._runs or self._is_alone or not self._turn.acquire(blocking=False):
            raise RuntimeError(AT_ONCE)
        try:
            self._is_alone = True  # the same thread could acquire the lock again
            yield
        finally:
            self._is_alone = False
            self._turn.release()

    def close(self) -> None:
        """Ends the threads, and waits for them unless they run; the next run makes new ones."""
        with self._lock:
            threads, end = self._threads, self._end
            self.begin()  # first: to one that is told to end no job may be given
            end()
        for thread in threads if not self._runs else ():
            thread.join(AT_EXIT)

    def run(self, jobs: Sequence[Callable[[], None]], cancel: Callable[[], None]) -> None:
        """Runs one job in each thread, and sleeps until all are done; raises what a job raised first."""
        if self._is_new:
            self._is_new = False
            for other in list(_alive):
                if not other._runs:
                    other.close()  # it makes new ones when it runs again
        ended, woken = list[BaseException | None](), SimpleQueue[None]()
        wait = partial(_await, ended, woken, len(jobs))
        try:
            with self._lock:  # two callers at once: every rank must get their jobs in one order
                if len(self._jobs) < len(jobs):
                    self._start(len(jobs) - len(self._jobs))
                tasks = [(job, cancel, ended, woken) for job in jobs]
                giving = map(SimpleQueue.put, self._jobs, tasks)
                self.left = wait
                list(giving)  # all or none, note "Interrupts"
            wait()
        except BaseException:
            cancel()
            if self.left is wait:
                wait()  # a second Ctrl-C waits no longer
                self.left = None
            raise
        self.left = None
        failure = next((error for error in ended if error is not None), None)
        ended.clear()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame

    def _start(self, threads: int) -> None:
        ready, started = SimpleQueue[None](), list[threading.Thread]()
        jobs = [SimpleQueue[Task | None]() for _ in range(threads)]
        own = torch.get_num_threads()
        try:
            for number, queue in enumerate(jobs, len(self._jobs)):
                target = partial(_serve, queue, self.intra_op_threads, ready)
                started.append(threading.Thread(target=target, name=f"{NAME} {number}", daemon=True))
                started[-1].start()
                ready.get()
            self._jobs += jobs
            self._threads += started
        except BaseException as error:
            _tell_to_end(jobs)
            if error.__context__ is not None and str(error) == "release unlocked lock":
                raise error.__context__ from None  # an interrupt, as Python's own start of a thread passes it on
            raise
        finally:
            torch.set_num_threads(own)  # a rank thread's number is also the default of threads to come


_alive = weakref.WeakSet[RankThreads]()


def _begin_all() -> None:
    """In a forked process: another thread may have had a lock."""
    for each in list(_alive):
        each._end.detach()
        each.unlock()
        each.begin()


os.register_at_fork(after_in_child=_begin_all)


@atexit.register
def _end_all() -> None:
    """Ends all rank threads and waits for them: an interpreter that ends under one of them aborts."""
    for each in list(_alive):
        each.close()
    until = time.monotonic() + AT_EXIT
    for thread in threading.enumerate():
        if thread.name.startswith(NAME) and thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


def _tell_to_end(jobs: Sequence[SimpleQueue[Task | None]]) -> None:
    for queue in jobs:
        queue.put(None)


def _serve(jobs: SimpleQueue[Task | None], intra_op_threads: int, ready: SimpleQueue[None]) -> None:
    torch.get_num_threads()  # at its first use a thread takes on the global number: not after its own was set
    torch.set_num_threads(intra_op_threads)
    ready.put(None)
    while (task := jobs.get()) is not None:
        (job, cancel, ended, woken), failure = task, None
        try:
            job()
        except BaseException as error:  # it is for the calling thread, whatever it is
            failure = None if isinstance(error, Cancelled) else error
            cancel()
        del task, job, cancel  # and with them the run, before its caller goes on
        ended.append(failure)
        woken.put(None)
        del failure, ended, woken


def _await(ended: Sequence[object], woken: SimpleQueue[None], jobs: int) -> None:
    """Sleeps until this number of jobs has ended."""
    while len(ended) < jobs:
        with suppress(Empty):
            woken.get(timeout=LOOK_SECONDS)
