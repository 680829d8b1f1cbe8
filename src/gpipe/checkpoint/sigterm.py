"""Handles SIGTERM and Ctrl-C, so that a run can save a checkpoint before it ends."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn

from gpipe.distributed.communicator import FirstError, all_gather_checked, communicator_of

TERMINATED = 128 + signal.SIGTERM  # the exit code that a shell reports after SIGTERM
OFF_MAIN_THREAD = (
    "gpipe.catch_sigterm: this is not the main thread, and only the main thread receives signals, so SIGTERM is not "
    "caught. Pass should_stop=<a function that asks the launcher>, such as ray.train.get_preemption_info. "
    "[sigterm-off-main-thread]"
)

logger = logging.getLogger("gpipe")


@contextmanager
def catch_sigterm(
    pipe: nn.Module, *, ctrl_c: bool = False, should_stop: Callable[[], object] | None = None
) -> Iterator[Callable[[], int]]:
    """Catches the first SIGTERM, so that the run can save a checkpoint at the end of a step.

    A second SIGTERM ends the process immediately. Cluster schedulers send SIGTERM some time before they stop a
    machine. After SIGTERM, save and exit with code 143 (`gpipe.checkpoint.sigterm.TERMINATED`). After Ctrl-C, exit
    with code 130. These codes show the scheduler that the run is not finished.

    Only the main thread receives signals. Ray Train and Monarch run your function in a different thread. In such a
    thread, pass `should_stop`.

    Args:
        pipe: The pipe.
        ctrl_c: Whether to also catch the first Ctrl-C. Default: False.
        should_stop: A function without arguments that returns a true value when the run must stop, such as
            `ray.train.get_preemption_info`. gpipe calls this function on each rank once per step. Default: None,
            which only catches signals.

    Yields:
        A function that every rank must call once per step. On all ranks, it returns the number of the signal that any
        rank received. If `should_stop` returned a true value on any rank, it returns the number of SIGTERM. Otherwise
        it returns 0.

    Raises:
        TypeError: If `pipe` is not a module, or if `should_stop` is not callable.
        RemoteError: If `should_stop` raised an error on a different rank. The yielded function raises this error.

    Example:
        >>> import gpipe, torch
        >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 1)], partitions=1, micro_batches=2)
        >>> with gpipe.catch_sigterm(pipe) as is_to_end:
        ...     for batch in range(3):
        ...         loss = pipe.step(torch.ones(2, 2), torch.ones(2, 1), torch.nn.functional.mse_loss)
        ...         if is_to_end():
        ...             gpipe.save("run", pipe).wait()
        ...             raise SystemExit(143)
    """
    if not isinstance(pipe, nn.Module):
        raise TypeError(f"pipe is a {type(pipe).__name__}. Pass the gpipe.GPipe: gpipe.catch_sigterm(pipe).")
    if not (should_stop is None or callable(should_stop)):
        raise TypeError(
            f"should_stop is a {type(should_stop).__name__}, which cannot be called. Pass a function that returns "
            "whether the run must stop."
        )
    ranks, received = communicator_of(pipe), 0

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def is_to_end() -> int:
        failed, stops = FirstError(), False
        with failed:
            stops = should_stop is not None and bool(should_stop())
        number = received or (signal.SIGTERM if stops else 0)
        doing = "checked for SIGTERM" if should_stop is None else "called should_stop"
        number = max(map(int, all_gather_checked(ranks, int(number), error=failed.error, doing=doing)))
        if number:
            ranks.note_signal()
        return number

    caught: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT) if ctrl_c else (signal.SIGTERM,)
    if threading.current_thread() is not threading.main_thread():
        caught = ()
        if should_stop is None:
            logger.warning(OFF_MAIN_THREAD)
    before = {number: signal.getsignal(number) for number in caught}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        for number in caught:
            signal.signal(number, receive)
        yield is_to_end
    finally:
        try:
            restore()
        finally:
            restore()  # A Ctrl-C that is not caught can end the first call.
