"""Measures the cores that other processes use."""

import os
import time
from pathlib import Path
from typing import NamedTuple

SOME_CORES = 0.2  # Cores used by other processes are reported from this number on.
STAT = Path("/proc/stat")
IDLE = (3, 4)  # the columns of idle time and of time waiting for a disk
MIN_SECONDS = 0.2  # The system counts in ticks of 10 ms, which is too coarse for shorter times.


class OtherProcesses(NamedTuple):
    """The mean number of cores that other processes used, and the number of cores of the machine."""

    cores: float
    of: int

    def __str__(self) -> str:
        return f"other processes used {self.cores:.1f} of this machine's {self.of} cores"


class Meter:
    """Measures the CPU time of all processes and of this process, from the creation of the meter until `stop`."""

    def __init__(self) -> None:
        self._start = _read()
        self._end: tuple[float, ...] = ()

    def stop(self) -> None:
        self._end = self._end or _read()

    def other_cores(self) -> float | None:
        """Returns the mean number of cores that other processes used, or None if the number cannot be measured."""
        others = self.others()
        return None if others is None else others.cores

    def others(self) -> OtherProcesses | None:
        """Returns the cores that other processes used, or None if this system does not report CPU times."""
        times = zip(self._start, self._end or _read(), strict=False)
        wall, every, own = tuple(until - since for since, until in times) or (0.0, 0.0, 0.0)
        if wall < MIN_SECONDS:
            return None
        return OtherProcesses(max(0.0, every - own) / wall, os.cpu_count() or 1)


def _read() -> tuple[float, ...]:
    """Returns the time, the CPU time of all processes, and the CPU time of this process, or () except on Linux."""
    try:
        ticks = [int(number) for number in STAT.read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return ()
    busy = sum(number for at, number in enumerate(ticks) if at not in IDLE) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, time.process_time()
