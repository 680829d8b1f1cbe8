"""Whether processes get on: by the time that they compute, which a busy machine stretches but does not stop.

python -m tests.support.progress PID    watches a test run, which writes the name of each test to this one's stdin

A test stands still if it, with all that it started, hardly computes for `LOOKS` looks in a row; it runs for ever if
it computes for `ENDLESS_SECONDS`. Then the run is aborted, and pytest's faulthandler tells where every thread was.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TICK = 0.01  # seconds
LOOK_SECONDS = 5.0
LOOKS = 60  # counted, not timed: a machine that stops for a while is no reason
LEAST_SHARE = 0.02  # of a core, over all looks: waiting processes that poll take less, a loaded machine leaves more
ENDLESS_SECONDS = 1200.0
TICKS = os.sysconf("SC_CLK_TCK")


class Progress:
    """What processes, and all that they have started, compute."""

    def __init__(self, pids: Collection[int]) -> None:
        self.pids = pids
        self.seconds = 0.0
        self._known: dict[int, float] = {}
        self._looks: deque[float] = deque(maxlen=LOOKS + 1)
        self._next = time.monotonic() + LOOK_SECONDS

    def stands_still(self) -> bool:
        """Looks, unless the last look was just now; says whether they have stood still for all looks."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + LOOK_SECONDS
        found = seconds_of(self.pids)
        self.seconds += sum(max(0.0, now - self._known.get(pid, 0.0)) for pid, now in found.items())
        self._known = found
        self._looks.append(self.seconds)
        return len(self._looks) > LOOKS and self._looks[-1] - self._looks[0] < LEAST_SHARE * LOOKS * LOOK_SECONDS

    def restart(self) -> None:
        self._looks.clear()


def seconds_of(pids: Collection[int]) -> dict[int, float]:
    """The processor time of processes and of all below them, those that have ended counted with their parents."""
    stats = all_stats()
    parents = {pid: int(words[1]) for pid, words in stats.items()}
    family = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return {pid: sum(map(int, stats[pid][11:15])) / TICKS for pid in family & stats.keys()}


def stat_of(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def all_stats() -> dict[int, list[str]]:
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return {pid: words for pid in pids if (words := stat_of(pid))}


def wait_until(condition: Callable[[], bool], log: Path | None = None) -> None:
    """Waits for what this process or one that it has started brings about, for as long as they get on.

    Raises:
        AssertionError: They stand still; with the end of the log, if there is one.
    """
    progress, pause = Progress([os.getpid()]), TICK / 100
    while not condition():
        if progress.stands_still():
            raise AssertionError(f"nothing moves\n{log.read_text(errors='replace')[-20_000:] if log else ''}")
        time.sleep(pause)
        pause = min(2 * pause, TICK)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, in text, of a command that may take as long as it gets on.

    Raises:
        AssertionError: It stood still; it was killed, and this says what it had printed.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **{**pipes, **options}) as process:
        progress = Progress([process.pid])
        while True:
            with suppress(subprocess.TimeoutExpired):
                printed, errors = process.communicate(timeout=LOOK_SECONDS)
                return subprocess.CompletedProcess(command, process.returncode, printed, errors)
            if progress.stands_still():
                process.kill()
                printed, errors = process.communicate()
                raise AssertionError(f"{' '.join(command)} stood still:\n{printed}\n{errors or ''}")


def start_watch() -> subprocess.Popen[str]:
    """Has a process of its own watch this one; it wants to be told the name of each test, on a line."""
    command = [sys.executable, "-S", __file__, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1)


def watch(pid: int) -> None:
    """Ends a process in whose test nothing moves, or that never ends."""
    progress, test, began = Progress([pid]), "", 0.0
    while True:
        if select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
            told = os.read(sys.stdin.fileno(), 1 << 16)
            if not told:
                return
            test, began = told.decode().split("\n")[-2], progress.seconds
            progress.restart()
            continue
        still = progress.stands_still()
        if still or progress.seconds - began > ENDLESS_SECONDS:
            how = f"stood still for {LOOKS * LOOK_SECONDS:g} s" if still else f"computed for {ENDLESS_SECONDS:g} s"
            print(f"\n{test} {how}: the test run is ended", file=sys.stderr, flush=True)
            os.kill(pid, signal.SIGABRT)
            return


if __name__ == "__main__":
    watch(int(sys.argv[1]))
