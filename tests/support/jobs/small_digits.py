"""The command `gpipe`, whose last epoch waits: what tests run as a process of its own, or under torchrun.

If the environment has `GO`, no process begins its last epoch before there is such a file, or before it is told to end
by SIGTERM or Ctrl-C: whoever looks is in time. `{rank}` in an argument is the rank of the process.
"""

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from gpipe.cli.main import main

EPOCHS = 3
GO = "GPIPE_TEST_GO"
TICK = 0.01  # seconds


def wait_to_go() -> None:
    while GO in os.environ and not Path(os.environ[GO]).exists() and not is_told_to_end():
        time.sleep(TICK)


def is_told_to_end() -> bool:
    """Whether a first signal has come, after which a second one would end this process."""
    return (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        or signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


if __name__ == "__main__":
    from gpipe.recipes import training

    original, epochs = training.take_steps, count(1)

    def take_steps(*given: Any) -> Any:
        if next(epochs) == EPOCHS:
            wait_to_go()
        return original(*given)

    vars(training).update(take_steps=take_steps)
    main([argument.replace("{rank}", os.environ.get("RANK", "0")) for argument in sys.argv[1:]])
