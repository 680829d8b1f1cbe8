"""Under torchrun: no process outlives the launcher that started it."""

import os
import signal
import threading
import time

NAME = "gpipe-launcher"
POLL = 0.5  # seconds between two looks
GRACE = 3.0  # seconds between the two signals


def end_with_launcher() -> None:
    """Under torchrun, has this process end within four seconds after torchrun is gone, even if it was killed.

    It gets SIGTERM, so that a run which catches that may save, and then SIGKILL. A thread looks who the parent is:
    the kernel would tell too, but on Linux alone, and already when the thread ends that started this process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and all(thread.name != NAME for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=[os.getppid()], name=NAME, daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
