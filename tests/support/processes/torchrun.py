"""Runs a module under torchrun, and ends all of it for sure."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes.fork_server import ONE_THREAD, ROOT
from tests.support.processes.launch import GRACE, LOOPBACK
from tests.support.processes.listening import family
from tests.support.progress import TICK, stat_of, wait_until


@dataclass
class Launched:
    """A launcher and its workers."""

    popen: subprocess.Popen[bytes]
    log: Path  # where it and its workers write
    known: dict[int, str] = field(default_factory=dict)  # workers seen, and when they began: numbers are given again

    def workers(self) -> list[int]:
        """All that the launcher has started and that still runs, also if the launcher is gone."""
        if self.popen.poll() is None:
            seen = {pid: _began(pid) for pid in family(self.popen.pid)[1:]}
            self.known |= {pid: began for pid, began in seen.items() if began}
        return [pid for pid, began in self.known.items() if _began(pid) == began]

    def wait(self) -> str:
        """Waits until the launcher has ended; gives the log."""
        wait_until(lambda: self.popen.poll() is not None, self.log)
        return self.log.read_text(errors="replace")

    def orphans(self, seconds: float) -> list[int]:
        """Kills the launcher and nothing else; gives the workers that still run so many seconds later."""
        self.workers()
        self.popen.kill()
        self.popen.wait()
        return self.outlive(seconds)

    def outlive(self, seconds: float) -> list[int]:
        """The workers that still run after so many seconds; it waits no longer than there are some."""
        until = time.monotonic() + seconds
        while self.workers() and time.monotonic() < until:
            time.sleep(TICK)
        return self.workers()


def _began(pid: int) -> str:
    """When a process began, in ticks of the kernel; empty if it has ended."""
    words = stat_of(pid)
    return words[19] if words and words[0] != "Z" else ""


@contextmanager
def torchrun(
    workers: int,
    module: str,
    *args: str,
    folder: Path,
    options: tuple[str, ...] = (),
    is_module: bool = True,
) -> Iterator[Launched]:
    """Starts so many workers of a module on this host; in the end all are killed.

    Args:
        workers: How many.
        module: What each runs, as `python -m` does.
        args: Its arguments.
        folder: For the log.
        options: More options of torchrun.
        is_module: Whether it is one; else the path of a program.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    log = folder / "torchrun.log"
    with log.open("wb") as stream:
        popen = subprocess.Popen(
            [*command, *meeting, *options, *["-m"] * is_module, module, *args],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD, **LOOPBACK, "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,
        )
    launched = Launched(popen, log)
    try:
        yield launched
    finally:
        left = launched.workers()
        popen.kill()
        popen.wait()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launched.outlive(GRACE)


def wait_for(launched: Launched, files: list[Path]) -> None:
    """Waits until the workers have made these files, for as long as they get on.

    Raises:
        AssertionError: They stand still, or the launcher has ended; with the end of the log.
    """
    ended, made = (lambda: launched.popen.poll() is not None), (lambda: all(file.exists() for file in files))
    wait_until(lambda: made() or ended(), launched.log)
    assert made(), f"torchrun has ended:\n{launched.log.read_text(errors='replace')[-20_000:]}"
