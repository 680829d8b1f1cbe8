"""Checks of `gpipe doctor --gpu` that end in unexpected ways. Each runs in a separate process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from gpipe.cli.gpu.page import Finding


def works(every: int) -> Iterator[Finding]:
    yield Finding("passed", f"one of {every}", {"seconds": 0.5})
    yield Finding("measured", "8 ms")


def falls_short(every: int) -> Iterator[Finding]:
    yield Finding("passed", "this")
    yield Finding("failed", "and not that")


def raises(every: int) -> Iterator[Finding]:
    yield Finding("passed", "the first")
    raise RuntimeError("CUDA error: an illegal memory access")


def crashes(every: int) -> Iterator[Finding]:
    yield Finding("passed", "what was before")
    os.kill(os.getpid(), signal.SIGSEGV)


def exits(every: int) -> Iterator[Finding]:
    yield Finding("passed", "begun")
    os._exit(7)


def stands_still(every: int) -> Iterator[Finding]:
    yield Finding("passed", "so far")
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print("started", other.pid, flush=True)
    time.sleep(3600)


def finds_nothing(every: int) -> Iterator[Finding]:
    yield from ()
