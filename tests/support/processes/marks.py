"""The instant from which a test counts: stamped where a fault happens, read by whoever started the ranks.

All processes of a host share the monotonic clock, so seconds may be counted from one rank's mark to another's error.
"""

import os
import time
from pathlib import Path

FOLDER = "GPIPE_TEST_FOLDER"


def mark() -> None:
    """Stamps this instant for this rank. Outside of a rank that `launch` started it does nothing."""
    if FOLDER in os.environ:
        name = f"rank_{os.environ['RANK']}.mark"
        Path(os.environ[FOLDER], name).write_text(repr(time.monotonic()))


def first_mark(folder: Path) -> float | None:
    """The earliest mark of all ranks, in seconds of `time.monotonic`; None if there is none."""
    return min((float(file.read_text()) for file in folder.glob("rank_*.mark")), default=None)


def wait_for(file: Path) -> None:
    """Waits until there is such a file; whoever waits for ever is ended with the test."""
    while not file.exists():
        time.sleep(0.01)
