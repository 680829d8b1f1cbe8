"""SIGTERM, or Ctrl-C: the run must end soon, and wants to save before it does."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn

from gpipe.distributed.communicator import communicator_of

TERMINATED = 128 + signal.SIGTERM  # what a shell reports of a process that SIGTERM ended


@contextmanager
def catch_sigterm(pipe: nn.Module, *, ctrl_c: bool = False) -> Iterator[Callable[[], int]]:
    """Notes the first SIGTERM, so that the run can save at the end of a step; a second one ends it at once.

    Schedulers of clusters send SIGTERM some time before they take a machine away. What is given, called once a step
    by every rank, gives the signal's number, and 0 where there was none. Leave with exit code 143
    (`gpipe.checkpoint.sigterm.TERMINATED`), which is what a process has that SIGTERM ended, so that nobody takes the
    run for finished. With `ctrl_c` the first Ctrl-C is noted as well; leave with 130 then. Signals come to the main
    thread alone: elsewhere this is a ValueError.

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
        raise TypeError(f"pipe is a {type(pipe).__name__}; give the gpipe.GPipe: gpipe.catch_sigterm(pipe)")
    team, asked = communicator_of(pipe), 0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    caught = (signal.SIGTERM, signal.SIGINT) if ctrl_c else (signal.SIGTERM,)
    before = {number: signal.getsignal(number) for number in caught}
    try:
        for number in caught:
            signal.signal(number, ask)
        yield lambda: max(map(int, team.all_gather(str(asked).encode())))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
