"""Whatever a layer raises comes back within seconds, with a note that says where; the next step works (law 5)."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe.runtime.threads import RankThreads
from tests.support.plain_loop import assert_same_bits, plain_call, plain_loop, same_bits, squares, weights_of
from tests.support.progress import wait_until

DRIVERS = ["lockstep", "threads"]
WAYS = ["step", "call"]
M = 3
X, Y = torch.randn(7, 4), torch.randn(7, 4)


class Raises(torch.autograd.Function):
    """Tells its layer about each of its backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Fragile") -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.pass_by("backward")
        return gradient, None


class Fragile(nn.Linear):
    """A layer that does something at its n-th forward or backward since it was armed."""

    countdown = -1
    phase = ""
    deed: Callable[[], object]

    def arm(self, phase: str, countdown: int, deed: Callable[[], object]) -> None:
        self.phase, self.countdown, self.deed = phase, countdown, deed

    def pass_by(self, phase: str) -> None:
        if phase == self.phase:
            self.countdown -= 1
            if self.countdown == -1:
                self.deed()

    def forward(self, x: Tensor) -> Tensor:
        self.pass_by("forward")
        return Raises.apply(super().forward(x), self)


def build() -> list[nn.Module]:
    with weights_of(1):
        return [nn.Linear(4, 4), Fragile(4, 4), Fragile(4, 4), nn.Tanh(), Fragile(4, 4), nn.Linear(4, 4)]


FRAGILE = {0: 1, 1: 2, 2: 4}  # stage to layer


def make(driver: str, remat: str = "always") -> gpipe.GPipe:
    return gpipe.GPipe(build(), [2, 2, 2], M, driver=driver, remat=remat, seed=0)


def fragile(pipe: gpipe.GPipe, stage: int) -> Fragile:
    layer = list(pipe.children())[FRAGILE[stage]]
    assert isinstance(layer, Fragile)
    return layer


def run(pipe: gpipe.GPipe, way: str) -> Tensor:
    if way == "step":
        return pipe.step(X, Y, mse_loss)
    loss = mse_loss(pipe(X), Y)
    loss.backward()
    return loss.detach()


def assert_works(pipe: gpipe.GPipe, way: str) -> None:
    """The next step gives the bits of the plain loop."""
    pipe.zero_grad()
    pipe.step_number = 0
    reference = build()
    plain = plain_loop if way == "step" else plain_call
    assert same_bits(run(pipe, way), plain(reference, X, Y, squares, micro_batches=M, seed=0))
    assert_same_bits(pipe, reference)


def throw(error: BaseException) -> Callable[[], object]:
    def deed() -> None:
        raise error

    return deed


class TiredError(Exception):
    """An exception that cannot be built from a text alone."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_a_layers_own_exception_comes_back_with_a_note_and_the_next_step_works(
    phase: str, stage: int, driver: str, way: str
) -> None:
    pipe = make(driver)
    error = TiredError(7, reason="tired")
    at = {"forward": 1, "recompute": M + 1, "backward": 1}[phase]
    fragile(pipe, stage).arm("backward" if phase == "backward" else "forward", at, throw(error))
    with pytest.raises(TiredError) as raised:
        run(pipe, way)
    assert raised.value is error
    assert error.reason == "tired"
    (note,) = error.__notes__
    layer = FRAGILE[stage]
    assert note.startswith(
        f"in the {phase} of micro-batch 1, rank {stage}, stage {stage}, layer {layer} ({layer}: Fragile), action "
    )
    kind = {"forward": "F", "recompute": "R", "backward": "B"}[phase]
    assert f">{stage}{kind}1<" in note.splitlines()[-1]
    assert pipe.step_number == (way == "call" and phase != "forward")
    assert_works(pipe, way)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("remat", ["never", "always"])
def test_a_loss_function_that_raises_is_told_apart_from_layers(remat: str, driver: str) -> None:
    pipe = make(driver, remat)
    error = TiredError(7, reason="no loss")

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if torch.equal(target, Y[3:5]):
            raise error
        return mse_loss(output, target)

    with pytest.raises(TiredError) as raised:
        pipe.step(X, Y, loss_fn)
    assert raised.value is error
    assert error.__notes__[0].startswith("in the loss of micro-batch 1, rank 2, stage 2, action ")
    assert pipe.step_number == 0
    assert_works(pipe, "step")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(3), StopIteration(4), MemoryError("full"), GeneratorExit(), RuntimeError()],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_of_odd_types_come_back_too(error: BaseException, phase: str, driver: str, way: str) -> None:
    pipe = make(driver)
    error = type(error)(*error.args)
    fragile(pipe, 1).arm(phase, 0, throw(error))
    with pytest.raises(type(error)) as raised:
        run(pipe, way)
    assert raised.value is error
    assert "stage 1, layer 2 (2: Fragile)" in error.__notes__[0]
    assert_works(pipe, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_layers_that_raise_on_several_ranks_at_once_end_in_one_error(phase: str, way: str) -> None:
    pipe = make("threads")
    barrier = threading.Barrier(2)
    errors = [TiredError(stage, reason="both") for stage in (0, 1)]

    def deed(error: TiredError) -> Callable[[], object]:
        def both() -> None:
            barrier.wait()
            raise error

        return both

    first, second = (1, 0) if phase == "forward" else (0, 1)  # stage 1 is one micro-batch behind, or ahead
    fragile(pipe, 0).arm(phase, first, deed(errors[0]))
    fragile(pipe, 1).arm(phase, second, deed(errors[1]))
    with pytest.raises(TiredError, match=r"0|1") as raised:
        run(pipe, way)
    assert raised.value in errors
    assert len(raised.value.__notes__) == 1
    assert_works(pipe, way)


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_error_of_torchs_own_backward_names_the_stage(driver: str) -> None:
    class Spoils(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.sigmoid()
            z = y * 2
            y.zero_()  # which the backward of sigmoid needs
            return z

    pipe = gpipe.GPipe([nn.Linear(4, 4), nn.Tanh(), Spoils()], [1, 2], 2, driver=driver)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        pipe.step(X, Y, mse_loss)
    note = raised.value.__notes__[0]
    assert "in the backward of micro-batch 0, rank 1, stage 1" in note
    assert "layer 2 (2: Spoils)" in note


def test_a_buffer_that_a_later_micro_batch_writes_is_told_of() -> None:
    class Averages(nn.Module):
        def __init__(self, copies: bool) -> None:
            super().__init__()
            self.linear, self.mean, self.copies = nn.Linear(4, 4), nn.Buffer(torch.ones(4)), copies

        def forward(self, x: Tensor) -> Tensor:
            self.mean.add_(1)
            return self.linear(x) * (self.mean.clone() if self.copies else self.mean)

    pipe = gpipe.GPipe([Averages(copies=False)], 1, 2, remat="never")
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        pipe.step(X, Y, mse_loss)
    assert "For a buffer, remat='always' also works. [buffer-changed-before-backward]" in raised.value.__notes__[0]
    gpipe.GPipe([Averages(copies=True)], 1, 2, remat="never").step(X, Y, mse_loss)
    gpipe.GPipe([Averages(copies=False)], 1, 2, remat="always").step(X, Y, mse_loss)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_failed_step_keeps_nothing_alive_once_its_error_is_dropped(phase: str, driver: str) -> None:
    pipe = make(driver, "never")
    inside: list[weakref.ref[Tensor]] = []
    hook = fragile(pipe, 0).register_forward_hook(lambda layer, given, out: inside.append(weakref.ref(out)))
    fragile(pipe, 1).arm(phase, 1, throw(TiredError(1, reason="")))
    with pytest.raises(TiredError):
        run(pipe, "step")
    hook.remove()
    gc.collect()
    assert len(inside) >= 2
    assert not any(ref() is not None for ref in inside)
    assert_works(pipe, "step")


def test_an_interrupt_while_jobs_are_handed_out_leaves_no_rank_waiting() -> None:
    class Interrupted(list[Callable[[], None]]):
        def __iter__(self) -> Iterator[Callable[[], None]]:
            yield self[0]
            raise KeyboardInterrupt

    threads, cancelled = RankThreads(1), threading.Event()
    with pytest.raises(KeyboardInterrupt):
        threads.run(Interrupted([lambda: None, lambda: None]), cancelled.set)
    assert cancelled.is_set()
    threads.run([lambda: None, lambda: None], cancelled.set)
    threads.close()


def test_an_interrupt_behind_the_handing_out_is_raised_once_the_ranks_are_done() -> None:
    """Bug story: they went on beside whoever had caught it, and added to gradients behind zero_grad()."""

    class Interrupted:
        def __enter__(self) -> None:
            pass

        __exit__ = interrupt

    def job() -> None:
        cancelled.wait()
        time.sleep(0.1)
        done.append(None)

    threads, cancelled, done = RankThreads(1), threading.Event(), list[None]()
    threads.run([lambda: None] * 2, cancelled.set)
    threads._lock = Interrupted()  # type: ignore[assignment]  # it is left when all have theirs
    with pytest.raises(KeyboardInterrupt):
        threads.run([job, job], cancelled.set)
    assert len(done) == 2
    threads.reset_locks()
    threads.close()


@pytest.mark.parametrize("waits", [False, True])
def test_an_interrupt_while_threads_are_made_leaves_none_behind(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it came as Python waits for a thread to begin, it came as a RuntimeError: "release unlocked lock"."""
    start, made = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        made.append(thread)
        if len(made) == 2:
            lock = threading.Lock()
            with lock:
                if waits:  # as threading.Condition does, which then wants the lock back
                    lock.release()
                raise KeyboardInterrupt

    threads, number = RankThreads(1), torch.get_num_threads()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            threads.run([lambda: None] * 3, lambda: None)
    assert torch.get_num_threads() == number
    wait_until(lambda: not any(thread.is_alive() for thread in made))
    threads.run([lambda: None] * 3, lambda: None)
    threads.close()


def test_an_interrupt_while_threads_are_ended_leaves_no_job_to_one_that_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug story: the next run waited for threads that were told to end."""
    threads = RankThreads(1)
    threads.run([lambda: None], lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(threads, "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            threads.close()
    threads.run([lambda: None], lambda: None)
    threads.close()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stays", [False, True])
def test_a_ctrl_c_that_wakes_nobody_is_heard_and_the_result_that_does_is_not_lost(stays: bool, way: str) -> None:
    """Bug story: one that came as the caller fell asleep was heard when a rank had ended, and that was forgotten.

    So it is where the system interrupts another thread than the one that hears it.
    """
    pipe, heard = make("threads"), threading.Event()

    def hear(*_: object) -> None:
        heard.set()
        raise KeyboardInterrupt

    def press() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if stays:
            heard.wait()

    before = signal.signal(signal.SIGINT, hear)
    try:
        fragile(pipe, 0).arm("backward", M - 1, press)
        with pytest.raises(KeyboardInterrupt):
            run(pipe, way)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_works(pipe, way)


class CtrlC:
    """A deed that takes long, and a thread that presses Ctrl-C meanwhile, each time when the last one was heard."""

    def __init__(self, times: int) -> None:
        self.begun, self.over, self.heard = threading.Event(), threading.Event(), threading.Semaphore(0)
        self.times, self.done = times, False
        self.thread = threading.Thread(target=self._press)

    def __enter__(self) -> "CtrlC":
        self.before = signal.signal(signal.SIGINT, self._hear)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        signal.signal(signal.SIGINT, self.before)

    def __call__(self) -> None:
        self.begun.set()
        self.over.wait()
        self.done = True

    def _press(self) -> None:
        ident = threading.main_thread().ident
        assert ident is not None
        self.begun.wait()
        for _ in range(self.times):
            time.sleep(0.1)  # the main thread is asleep, waiting for the ranks
            signal.pthread_kill(ident, signal.SIGINT)
            self.heard.acquire()
        if self.times == 1:
            self.over.set()

    def _hear(self, *_: object) -> None:
        self.heard.release()
        raise KeyboardInterrupt


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_ctrl_c_ends_a_step_as_soon_as_the_layer_under_way_is_done(
    phase: Literal["forward", "backward"], driver: str, way: str
) -> None:
    pipe = make(driver)
    with CtrlC(times=1) as pressed:
        fragile(pipe, 1).arm(phase, 1, pressed)
        with pytest.raises(KeyboardInterrupt):
            run(pipe, way)
    assert_works(pipe, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_second_ctrl_c_waits_no_longer(way: str) -> None:
    pipe = make("threads")
    with CtrlC(times=2) as pressed:
        fragile(pipe, 1).arm("forward", 1, pressed)
        with pytest.raises(KeyboardInterrupt):
            run(pipe, way)
        assert not pressed.done  # the layer is still at it
    assert_works(pipe, way)


@pytest.mark.parametrize("way", WAYS)
def test_what_ranks_add_to_gradients_behind_a_second_ctrl_c_is_in_no_step(way: str) -> None:
    """Bug story: a rank was in its backward when zero_grad() was called, and added to what the next step made."""
    pipe = make("threads")
    with CtrlC(times=2) as pressed:
        fragile(pipe, 1).arm("backward", 1, pressed)
        with pytest.raises(KeyboardInterrupt):
            run(pipe, way)
        pipe.zero_grad()
        assert not pressed.done
    with pytest.raises(RuntimeError, match=r"\[interrupted-twice\]"):
        run(pipe, way)
    assert_works(pipe, way)
