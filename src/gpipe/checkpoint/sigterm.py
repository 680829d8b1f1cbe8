"""Handles SIGTERM and Ctrl-C, so that a run can save a checkpoint before it ends."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn

from gpipe.distributed.communicator import communicator_of

TERMINATED = 128 + signal.SIGTERM  # the exit code that a shell reports after SIGTERM


@contextmanager
def catch_sigterm(pipe: nn.Module, *, ctrl_c: bool = False) -> Iterator[Callable[[], int]]:
    """Catches the first SIGTERM, so that the run can save a checkpoint at the end of a step. A second one ends it.

    Cluster schedulers send SIGTERM some time before they stop a machine. After saving, exit with code 143
    (`gpipe.checkpoint.sigterm.TERMINATED`) after SIGTERM, or with 130 after Ctrl-C. Then the scheduler does not
    consider the run finished.

    Args:
        pipe: The pipe.
        ctrl_c: Whether to catch the first Ctrl-C too. Default: False.

    Yields:
        A function that every rank calls once per step. It returns the number of the signal that any rank received, or
        0 if there was none.

    Raises:
        TypeError: If `pipe` is not a module.
        ValueError: If it is called outside the main thread, which is the only one that can receive signals.

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
    ranks, received = communicator_of(pipe), 0

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    caught = (signal.SIGTERM, signal.SIGINT) if ctrl_c else (signal.SIGTERM,)
    before = {number: signal.getsignal(number) for number in caught}
    try:
        for number in caught:
            signal.signal(number, receive)
        yield lambda: max(map(int, ranks.all_gather(str(received).encode())))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
