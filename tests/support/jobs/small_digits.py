"""The command `gpipe` on few small images, so that an epoch is two steps: what tests run under torchrun.

If the environment has `GO`, no process begins its last epoch before there is such a file, or before it is told to end
by a SIGTERM: whoever looks is in time.
"""

import os
import signal
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from gpipe.cli.main import main
from gpipe.datasets import Digits, load_digits
from gpipe.recipes import digits as job
from gpipe.recipes import loop
from gpipe.recipes.recipe import Recipe

BATCH_SIZE, MICRO_BATCHES = 8, 4
STEPS = 2
EPOCHS = 3
GO = "GPIPE_TEST_GO"
TICK, LIMIT = 0.01, 250.0  # seconds


def few() -> Digits:
    digits = load_digits(size=32)
    return Digits(train=digits.train[: STEPS * BATCH_SIZE + 2], held_out=digits.held_out[:6])


def wait_to_go() -> None:
    until = time.monotonic() + LIMIT
    while GO in os.environ and not Path(os.environ[GO]).exists() and not is_told_to_end():
        assert time.monotonic() < until
        time.sleep(TICK)


def is_told_to_end() -> bool:
    """Whether a first SIGTERM has come, after which a second one would end this process."""
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def train_epoch(*given: Any) -> Any:
    if next(epochs) == EPOCHS:
        wait_to_go()
    return loop.train_epoch(*given)


epochs = count(1)

if __name__ == "__main__":
    vars(job).update(load_digits=few, Recipe=partial(Recipe, batch_size=BATCH_SIZE), train_epoch=train_epoch)
    main(sys.argv[1:])
