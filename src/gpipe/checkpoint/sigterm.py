"""SIGTERM: the run is told to end soon, and wants to save before it does."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn

from gpipe.distributed.agree import any_says, team_of

TERMINATED = 128 + signal.SIGTERM  # what a shell reports of a process that SIGTERM ended


class Termination:
    """Whether this run is to end; called once a step, by every rank."""

    def __init__(self, pipe: nn.Module) -> None:
        self._team = team_of(pipe)
        self._asked = False

    def __call__(self) -> bool:
        """Whether any rank was told to end: all ranks hear the same, at the same step."""
        return any_says(self._team, self._asked)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the second one quits


@contextmanager
def catch_sigterm(pipe: nn.Module) -> Iterator[Termination]:
    """Notes the first SIGTERM, so that the run can save at the end of a step; a second one ends it at once.

    Schedulers of clusters send SIGTERM some time before they take a machine away. Leave with exit code 143
    (`gpipe.checkpoint.sigterm.TERMINATED`), which is what a process has that SIGTERM ended, so that nobody takes the
    run for finished.

    Raises:
        ValueError: This is not the main thread, which alone hears signals.

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
    termination = Termination(pipe)
    before = signal.signal(signal.SIGTERM, termination._ask)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, before)
