"""How much of this machine other processes use meanwhile."""

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
IDLE = (3, 4)  # the columns of time without work: idle, and waiting for a disk
ENOUGH = 0.2  # seconds; in less the system's ticks of 10 ms say little


class Others(NamedTuple):
    """What other processes used meanwhile.

    >>> str(Others(cores=0.82, of=2))
    "other processes used 0.8 of this machine's 2 cores"
    """

    cores: float
    of: int

    def __str__(self) -> str:
        return f"other processes used {self.cores:.1f} of this machine's {self.of} cores"


class Meter:
    """Compares the processors' time of all processes with that of this one, from now until `stop`."""

    def __init__(self) -> None:
        self._start = _read()
        self._end: tuple[float, float, float] | None = None

    def stop(self) -> None:
        """Ends it."""
        self._end = self._end or _read()

    def others(self) -> Others | None:
        """The cores that other processes used, and how many there are; None where that cannot be known."""
        end = self._end or _read()
        if self._start is None or end is None:
            return None
        wall, every, own = (until - since for since, until in zip(self._start, end, strict=True))
        if wall < ENOUGH:
            return None
        return Others(max(0.0, every - own) / wall, os.cpu_count() or 1)


def _read() -> tuple[float, float, float] | None:
    """Now, and the seconds that processors have worked: for all processes, for this one."""
    try:
        ticks = [int(number) for number in STAT.read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    busy = sum(number for at, number in enumerate(ticks) if at not in IDLE) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, time.process_time()
