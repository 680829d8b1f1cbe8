"""A thread for each rank: they work at the same time, end with their pipe, leave the caller's settings alone."""

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpipe
from gpipe._torch.dispatcher import SLOT
from gpipe.config.options import DRIVERS
from gpipe.runtime import threads
from tests.support.odd_layers import Apply
from tests.support.plain_loop import assert_same_bits, plain_loop, same_bits, squares, weights_of
from tests.support.progress import run, wait_until

X, Y = torch.randn(6, 3), torch.randn(6, 2)


def build() -> list[nn.Module]:
    with weights_of(1):
        return [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]


def make(**changes: Any) -> gpipe.GPipe:
    return gpipe.GPipe(build(), 3, 3, **{"seed": 0, "driver": "threads", **changes})


others: set[threading.Thread] = set()


def rank_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("gpipe rank") and t not in others]


@pytest.fixture(autouse=True)
def _leaves_no_thread_behind() -> Iterator[None]:
    gc.collect()
    others.update(rank_threads())  # of tests that failed, perhaps: their pipes live on in a traceback
    yield
    gc.collect()
    wait_until(lambda: not rank_threads())
    others.clear()


@pytest.mark.parametrize("way", ["step", "call", "no_grad"])
def test_a_dropped_pipe_is_gone_at_once_without_the_garbage_collector(way: str) -> None:
    gc.disable()
    try:
        pipe = make()
        if way == "step":
            pipe.step(X, Y, squares)
        elif way == "call":
            squares(pipe(X), Y).backward()
        else:
            with torch.no_grad():
                pipe(X)
        last = weakref.ref(list(pipe.children())[-1])
        gone = weakref.ref(pipe)
        assert len(rank_threads()) == 3
        del pipe
        assert gone() is None
        wait_until(lambda: not rank_threads())
        wait_until(lambda: last() is None)
    finally:
        gc.enable()


def test_threads_are_made_when_first_needed_and_kept() -> None:
    pipe = make()
    assert not rank_threads()
    pipe.step(X, Y, squares)
    first = set(rank_threads())
    assert len(first) == 3
    assert all(thread.daemon for thread in first)
    pipe(X).sum().backward()
    with pytest.raises(RuntimeError, match="shape"):
        pipe.step(X[:, :2], Y, squares)
    pipe.step(X[:1], Y[:1], squares)
    assert set(rank_threads()) == first


def test_close_and_with_end_the_threads_and_the_pipe_works_again() -> None:
    pipe = make()
    pipe.close()  # before there are any
    with pipe as same:
        assert same is pipe
        pipe.step(X, Y, squares)
        assert len(rank_threads()) == 3
    assert not rank_threads()
    pipe.close()  # once more does no harm
    pipe.zero_grad()
    pipe.step_number = 0
    reference = build()
    assert same_bits(pipe.step(X, Y, squares), plain_loop(reference, X, Y, squares, micro_batches=3, seed=0))
    assert_same_bits(pipe, reference)
    pipe.close()
    assert not rank_threads()


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("way", ["step", "no_grad"])
def test_an_exception_put_into_an_idle_rank_thread_is_raised_and_the_pipe_works_again(way: str, number: int) -> None:
    """Bug story: the thread ended, and the next step waited for it for ever."""
    pipe = make()
    expected = pipe.step(X, Y, squares)
    idle = next(thread for thread in rank_threads() if thread.name.endswith(str(number)))
    put = ctypes.pythonapi.PyThreadState_SetAsyncExc
    put(ctypes.c_ulong(idle.ident or 0), ctypes.py_object(ZeroDivisionError))
    raised: list[BaseException] = []

    def call() -> None:
        try:
            if way == "step":
                pipe.step(X, Y, squares)
            else:
                with torch.no_grad():
                    pipe(X)
        except RuntimeError as error:
            raised.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(20)
    assert not caller.is_alive()
    assert "[rank-thread-ended]" in str(raised[0])
    assert isinstance(raised[0].__cause__, ZeroDivisionError)
    raised.clear()
    pipe.zero_grad()
    pipe.step_number = 0
    assert same_bits(pipe.step(X, Y, squares), expected)
    pipe.step_number = 0
    assert same_bits(pipe.step(X, Y, squares), expected)


def test_a_loss_that_closes_its_pipe_waits_for_no_rank() -> None:
    pipe = make()

    def closing(output: Tensor, targets: Tensor) -> Tensor:
        pipe.close()
        return squares(output, targets)

    pipe.step(X, Y, closing)
    pipe.close()


def test_the_first_run_of_a_pipe_ends_the_threads_of_those_that_are_idle() -> None:
    """Bug story: a notebook keeps what a cell has shown, so cells that were run again left a pipe's threads each."""
    kept = []
    for _ in range(4):
        kept.append(make())
        kept[-1].step(X, Y, squares)
        wait_until(lambda: len(rank_threads()) == 3)
    for pipe in kept[:2]:  # two that take turns have their threads from then on
        pipe.step(X, Y, squares)
    wait_until(lambda: len(rank_threads()) == 9)
    threads = set(rank_threads())
    for pipe in kept[:2] * 3:
        pipe.step(X, Y, squares)
    assert set(rank_threads()) == threads


def test_the_first_run_of_a_pipe_while_another_runs_leaves_that_one_its_threads() -> None:
    inner, outer = make(), make()
    before = set[threading.Thread]()

    def call(*_: object) -> None:
        before.update(rank_threads())
        inner(X)

    outer[0].register_forward_hook(call)
    with torch.no_grad():
        outer(X)
    assert len(before) >= 3
    assert before <= set(rank_threads())


def in_child(work: Callable[[], object]) -> None:
    """Runs something in a forked process."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    try:
        wait_until(lambda: child.exitcode is not None)
    finally:
        child.kill()
    assert child.exitcode == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_a_forked_process_steps_with_threads_of_its_own_and_leaves_the_parents_alone(
    driver: str, used_before: bool
) -> None:
    pipe = make(driver=driver)
    expected = make(driver="lockstep").step(X, Y, squares)
    if used_before:
        pipe.step(X, Y, squares)
    before = set(rank_threads())

    def work() -> None:
        assert not rank_threads()
        pipe.step_number = 0
        assert same_bits(pipe.step(X, Y, squares), expected)
        squares(pipe(X), Y).backward()
        assert len(rank_threads()) == (3 if driver == "threads" else 0)
        pipe.close()
        wait_until(lambda: not rank_threads())

    in_child(work)
    in_child(pipe.close)
    assert set(rank_threads()) == before
    pipe.step_number = 0
    assert same_bits(pipe.step(X, Y, squares), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_another_thread_steps_can_step() -> None:
    pipe, over = make(), threading.Event()

    def keep_stepping() -> None:
        while not over.is_set():
            pipe.step(X, Y, squares)

    stepping = threading.Thread(target=keep_stepping)
    stepping.start()
    try:
        for _ in range(3):
            in_child(lambda: pipe.step(X, Y, squares))
    finally:
        over.set()
        stepping.join()


class SlowQueue(SimpleQueue[Any]):
    """Takes so long to put something in that another thread gets its turn."""

    random = Random(0)

    def put(self, item: object, *more: Any) -> None:
        time.sleep(self.random.choice([0, 0.003]))
        super().put(item, *more)


def test_several_callers_at_once_do_not_block_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SimpleQueue", SlowQueue)
    pipe = make()
    expected = pipe.step(X, Y, squares)
    found: list[Tensor] = []

    def keep_stepping() -> None:
        found.extend(pipe.step(X, Y, squares) for _ in range(10))

    callers = [threading.Thread(target=keep_stepping, daemon=True) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(same_bits(loss, expected) for loss in found)
    assert len(found) == 30


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_several_callers_leave_shared_weights_where_they_are(driver: str) -> None:
    """Bug story: the alias of one run was taken for the weight by another, which put it back in the end."""
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    pipe = gpipe.GPipe([first, nn.Tanh(), last], 2, 3, driver=driver)
    with ThreadPoolExecutor(3) as callers:
        losses = list(callers.map(lambda _: pipe(X).sum(), range(30)))
        list(callers.map(Tensor.backward, losses))
    assert pipe[0].weight is pipe[2].weight is first.weight
    assert first.weight.grad is not None


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_what_the_handler_of_a_signal_raises_ends_a_step_as_an_interrupt_does(driver: str) -> None:
    """Bug story: the step ended, and its ranks went on."""
    running: set[int] = set()

    def handler(*_: object) -> None:
        raise TimeoutError

    def slow(x: Tensor) -> Tensor:
        number = len(seen)
        seen.append(number)
        running.add(number)
        if number == 1:
            os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.05)
        running.remove(number)
        return x * 2

    seen: list[int] = []
    pipe = gpipe.GPipe([nn.Linear(3, 3), Apply(slow), nn.Linear(3, 2)], 2, 6, driver=driver, remat="never")
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError):
            pipe.step(X, Y, squares)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not running - {1} if driver == "lockstep" else not running
    assert len(seen) < 6


class CountsThreads(nn.Linear):
    """Notes the number of intra-op threads in its forwards and backwards."""

    def __init__(self, width: int, seen: list[int]) -> None:
        super().__init__(width, width)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.get_num_threads())
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.seen.append(torch.get_num_threads()))
        return out


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("callers", [1, 2])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_every_rank_uses_intra_op_threads_and_the_callers_number_is_restored(
    driver: str, callers: int, number: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(callers)
    try:
        seen: list[int] = []
        layers = [CountsThreads(3, seen) for _ in range(3)]
        pipe = gpipe.GPipe(layers, 3, 2, driver=DRIVERS[driver](intra_op_threads=number))
        pipe.step(X, X, squares)
        assert torch.get_num_threads() == callers
        squares(pipe(X), X).backward()
        assert torch.get_num_threads() == callers
        with pytest.raises(RuntimeError):
            pipe.step(X[:, :2], X, squares)
        assert torch.get_num_threads() == callers
        with torch.no_grad():
            pipe(X)
        assert set(seen) == {number}
        other: list[int] = []
        thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert other == [callers]  # threads to come have the caller's number, too
    finally:
        torch.set_num_threads(before)


class Meets(torch.autograd.Function):
    """Waits in its backward until another one is in its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, barrier: threading.Barrier) -> Tensor:
        ctx.barrier = barrier
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.barrier.wait()
        return gradient, None


class Together(nn.Linear):
    """Runs only while the other one runs too."""

    def __init__(self, width: int, phase: str, barrier: threading.Barrier, alone: int) -> None:
        super().__init__(width, width)
        self.phase, self.barrier, self.alone = phase, barrier, alone
        self.done = 0

    def forward(self, x: Tensor) -> Tensor:
        self.done += 1
        own = self.done == self.alone
        if self.phase == "forward" and not own:
            self.barrier.wait()
        out = super().forward(x)
        if self.phase == "backward" and not own:
            out = Meets.apply(out, self.barrier)
        return out


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("way", ["step", "call"])
def test_layers_of_different_stages_run_at_the_same_time(way: str, phase: str) -> None:
    barrier = threading.Barrier(2)
    # stage 0 is one micro-batch ahead in the forward, where it is alone with the first and stage 1 with the last one;
    # in the backward it is one behind, and so the other way round
    first, last = (1, 3) if phase == "forward" else (3, 1)
    layers = [Together(3, phase, barrier, alone=first), Together(3, phase, barrier, alone=last)]
    pipe = gpipe.GPipe(layers, 2, 3, remat="never")
    pipe.verify_steps = False  # in a replay a stage would wait for the other
    if way == "step":
        pipe.step(X, X, squares)
    else:
        squares(pipe(X), X).backward()


AT_EXIT = """
import atexit, threading
import torch
import gpipe
from gpipe.config.options import DRIVERS
atexit.register(lambda: print([one.name for one in threading.enumerate() if one.name.startswith("gpipe rank")]))
pipes = [gpipe.GPipe([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], 2, 2) for _ in range(3)]
for pipe in 2 * pipes:  # the first run of each ends the threads of those before it
    pipe.step(torch.ones(4, 2), torch.ones(4, 2), torch.nn.functional.mse_loss)
print(sum(one.name.startswith("gpipe rank") for one in threading.enumerate()))
"""


def test_no_rank_thread_is_left_for_the_interpreter_to_end() -> None:
    """One that it ended inside of C++ aborted the process, now and then, when everything was done."""
    done = run([sys.executable, "-c", AT_EXIT], stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["6", "[]"]


def test_a_run_leaves_torch_nothing_to_let_go_of_when_its_thread_ends() -> None:
    """Bug story: it needs an interpreter, which may be gone by then; one in three programs of threads aborted."""
    make(driver="lockstep").step(X, Y, squares)
    assert not torch._C._is_key_in_tls(SLOT)


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_a_pipe_that_a_layer_calls_for_ever_is_refused_and_works_again(driver: str) -> None:
    """Bug story: in lockstep it ended in a bare RecursionError."""
    with make(driver=driver) as pipe:
        loss = pipe.step(X, Y, squares)
        hook = pipe[0].register_forward_hook(lambda *_: pipe.step(X, Y, squares) and None)
        for way in (lambda: pipe.step(X, Y, squares), lambda: pipe(X)):
            with pytest.raises(RuntimeError, match=r"\[pipe-called-within-itself\]"):
                way()
        hook.remove()
        pipe.step_number = 0
        assert same_bits(pipe.step(X, Y, squares), loss)


def test_a_checkpoint_around_a_pipe_is_refused_and_does_not_wait_for_itself() -> None:
    with make() as pipe:
        output = checkpoint(pipe, X.clone().requires_grad_(), use_reentrant=False)
        with pytest.raises(RuntimeError, match=r"\[pipe-called-within-itself\]"):
            output.sum().backward()
