"""The threads in which ranks run, and the rules about which calls of a pipe can run at the same time.

The first run starts the threads, and later runs reuse them. A thread refers only to its queue of jobs, so that a pipe
can be garbage-collected. The threads end when the pipe is garbage-collected or the interpreter exits. In a notebook,
a pipe stays alive when its cell runs again. The first run of a new pipe therefore ends the threads of all idle pipes.

Note "Interrupts". Python raises KeyboardInterrupt, or the exception of a different signal handler, only in the main
thread, after a call or between iterations of a loop. Updates that must not be interrupted are therefore a single call
of a C function, or assignments without calls. An interrupt can lose a result that was taken out of a queue, but not a
result in a list.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch
from torch import nn

from gpipe.stages.messages import Cancelled

Ended: TypeAlias = list[tuple[int, BaseException | None]]
"""The numbers of the jobs that have ended, with their errors."""
Task: TypeAlias = tuple[int, Callable[[], None], Callable[[], None], Ended, SimpleQueue[None]]
"""A job and its number, a function that cancels the other jobs, the ended jobs, and a queue that wakes the caller."""
NAME = "gpipe rank"
WITHIN = (
    "pipe: the pipe was called inside its own run (by a layer, hook, logits processor or torch.utils.checkpoint), so "
    "it would wait for itself. Call the pipe outside of its run. To recompute activations, use GPipe(..., "
    "remat=...). [pipe-called-within-itself]"
)
AT_ONCE = (
    "pipe: a call of the pipe is already running, in a different thread or around this call. Wait until that call "
    "returns. Make the calls in the same order in every process. [concurrent-calls]"
)
INTERRUPTED_TWICE = (
    ".grad: rank threads finished a mini-batch that was interrupted twice, possibly after the last zero_grad(). Call "
    "zero_grad() and repeat the step. [interrupted-twice]"
)
CONCURRENT_BACKWARDS = (
    "backward(): autograd has started a backward pass inside a backward pass of the same pipe. Pass all inputs in "
    "one call of the pipe, call backward() for each output separately, or use a process per device. "
    "[concurrent-backwards]"
)
THREAD_ENDED = (
    "pipe: an exception that was raised in a rank thread from outside, as by PyThreadState_SetAsyncExc, has ended "
    "the thread. The next call starts new threads. If this was a step, call zero_grad() and repeat it. "
    "[rank-thread-ended]"
)
LOOK_SECONDS = 1.0  # A signal that arrives while its thread falls asleep does not wake it.
AT_EXIT = 2.0  # Seconds to wait for threads at exit: the process aborts if the interpreter ends a thread inside C++.


class RankThreads:
    """The threads of a pipe, one per rank. Threads start when they are first needed."""

    def __init__(self, intra_op_threads: int) -> None:
        self.intra_op_threads = intra_op_threads
        self._is_new = True
        self.generation_threads: Sequence[threading.Thread] = ()  # threads that run the model's `generate`
        self.reset_locks()
        self.begin()
        _alive.add(self)

    def reset_locks(self) -> None:
        """Creates new locks and clears all counters, as for a new pipe."""
        self._turn, self._lock = threading.RLock(), threading.Lock()
        self._runs, self._is_exclusive = 0, False
        self._wait_for_interrupted: Callable[[], None] | None = None  # set if a second Ctrl-C ended the waiting
        self._in_backward: set[int] = set()  # threads that run `backward()`

    def begin(self) -> None:
        """Starts without threads. Called after all threads have ended, and in a forked process."""
        jobs, threads, fatal = list[SimpleQueue[Task | None]](), list[threading.Thread](), list[BaseException]()
        end = weakref.finalize(self, _end_threads, jobs)
        end.atexit = False  # `_end_all` also waits for the threads.
        self._jobs, self._threads, self._fatal, self._end = jobs, threads, fatal, end  # note "Interrupts"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lets only one caller run at a time, because modules hold aliases of shared weights during a run."""
        if threading.current_thread() in (*self._threads, *self.generation_threads):
            raise RuntimeError(WITHIN)
        with self._turn:
            if self._runs > 1:  # A loss may call the pipe under driver="lockstep". A layer that does so never ends.
                raise RuntimeError(WITHIN)
            self._runs += 1
            try:
                yield
            finally:
                self._runs -= 1

    def check_interrupted(self, layers: Iterable[nn.Module]) -> None:
        """Waits for a mini-batch that was interrupted twice. Raises an error if `.grad` may hold its gradients."""
        if self._wait_for_interrupted is not None:
            self._wait_for_interrupted()
            gradients = (weight.grad for layer in layers for weight in layer.parameters())
            if any(gradient is not None and gradient.to_dense().any() for gradient in gradients):
                raise RuntimeError(INTERRUPTED_TWICE)
            self._wait_for_interrupted = None

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Rejects nested backward passes, which autograd may start in a thread that waits for a device."""
        thread = threading.get_ident()
        if thread in self._in_backward:
            raise RuntimeError(CONCURRENT_BACKWARDS)
        self._in_backward.add(thread)
        try:
            yield
        finally:
            self._in_backward.discard(thread)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Rejects a concurrent call of a pipe with several processes, before the processes exchange messages."""
        if self._runs or self._is_exclusive or not self._turn.acquire(blocking=False):
            raise RuntimeError(AT_ONCE)
        try:
            self._is_exclusive = True  # The same thread could acquire the lock again.
            yield
        finally:
            self._is_exclusive = False
            self._turn.release()

    def close(self) -> None:
        """Ends the threads, and waits for them if no run is active. The next run starts new threads."""
        with self._lock:
            threads, end = self._threads, self._end
            self.begin()  # before `end`, so that no thread receives a job after the request to end
            end()
        for thread in threads if not self._runs else ():
            thread.join(AT_EXIT)

    def run(self, jobs: Sequence[Callable[[], None]], cancel: Callable[[], None]) -> None:
        """Runs one job in each thread and waits for all jobs. Raises the error of the first job that failed."""
        if self._is_new:
            self._is_new = False
            for threads in list(_alive):
                if not threads._runs:
                    threads.close()
        ended, woken, wait = Ended(), SimpleQueue[None](), None
        try:
            self._check_alive()
            with self._lock:  # All threads must receive the jobs of concurrent callers in the same order.
                if len(self._jobs) < len(jobs):
                    self._start(len(jobs) - len(self._jobs))
                tasks = [(number, job, cancel, ended, woken) for number, job in enumerate(jobs)]
                wait = partial(_await, ended, woken, self._threads[: len(jobs)], cancel)
                puts = map(SimpleQueue.put, self._jobs, tasks)
                self._wait_for_interrupted = wait
                list(puts)  # one call: passes all jobs or none, note "Interrupts"
            wait()
        except BaseException:
            cancel()
            if wait is not None and self._wait_for_interrupted is wait:
                wait()  # A second Ctrl-C ends this.
                self._wait_for_interrupted = None
            raise
        self._wait_for_interrupted = None
        failure = next((error for _, error in ended if error is not None), None)
        if len(ended) < len(jobs):
            self._check_alive()
            raise RuntimeError(THREAD_ENDED)  # A different call has already replaced the thread.
        ended.clear()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # The traceback of the error refers to this frame.

    def _check_alive(self) -> None:
        """Raises an error if a thread has ended by an exception, and forgets all threads."""
        if not all(map(threading.Thread.is_alive, self._threads)):
            fatal = self._fatal
            self.close()
            raise RuntimeError(THREAD_ENDED) from next(iter(fatal), None)

    def _start(self, threads: int) -> None:
        ready, started = SimpleQueue[None](), list[threading.Thread]()
        jobs = [SimpleQueue[Task | None]() for _ in range(threads)]
        intra_op_threads = torch.get_num_threads()
        try:
            for number, queue in enumerate(jobs, len(self._jobs)):
                target = partial(_serve, queue, self.intra_op_threads, ready, self._fatal)
                started.append(threading.Thread(target=target, name=f"{NAME} {number}", daemon=True))
                started[-1].start()
                ready.get()
            self._jobs += jobs
            self._threads += started
        except BaseException as error:
            _end_threads(jobs)
            if error.__context__ is not None and str(error) == "release unlocked lock":
                raise error.__context__ from None  # An interrupt in Thread.start() raises this RuntimeError.
            raise
        finally:
            torch.set_num_threads(intra_op_threads)  # Rank threads also set the default of new threads.


_alive = weakref.WeakSet[RankThreads]()


def _reset_all() -> None:
    """Resets all pipes in a forked process, because threads that do not exist in this process may hold locks."""
    for threads in list(_alive):
        threads._end.detach()
        threads.reset_locks()
        threads.begin()


os.register_at_fork(after_in_child=_reset_all)


@atexit.register
def _end_all() -> None:
    """Ends all rank threads and waits for their end, because exiting while a thread runs can abort the process."""
    for threads in list(_alive):
        threads.close()
    until = time.monotonic() + AT_EXIT
    for thread in threading.enumerate():
        if thread.name.startswith(NAME) and thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


def _end_threads(jobs: Sequence[SimpleQueue[Task | None]]) -> None:
    for queue in jobs:
        queue.put(None)


def _serve(
    jobs: SimpleQueue[Task | None], intra_op_threads: int, ready: SimpleQueue[None], fatal: list[BaseException]
) -> None:
    try:
        torch.get_num_threads()  # The first call sets this thread's number to the global one, so it must come first.
        torch.set_num_threads(intra_op_threads)
        ready.put(None)
        while (task := jobs.get()) is not None:
            (number, job, cancel, ended, woken), failure = task, None
            try:
                job()
            except BaseException as error:  # The calling thread raises it.
                failure = None if isinstance(error, Cancelled) else error
                cancel()
            del task, job, cancel  # They refer to the run, which its caller may free after this.
            ended.append((number, failure))
            woken.put(None)
            del failure, ended, woken
    except BaseException as error:  # raised by a different thread in this one, outside a job
        fatal.append(error.with_traceback(None))  # The traceback refers to the run.


def _await(
    ended: Ended, woken: SimpleQueue[None], threads: Sequence[threading.Thread], cancel: Callable[[], None]
) -> None:
    """Waits until each of these threads has ended its job, or can never end it."""
    lost = set[int]()
    while len(ended) + len(lost) < len(threads):
        try:
            woken.get(timeout=LOOK_SECONDS)
        except Empty:
            dead = {number for number, thread in enumerate(threads) if not thread.is_alive()}
            if lost := dead - {number for number, _ in ended}:
                cancel()
