"""Starts ranks with torch loaded: each is forked from a process that has loaded it and has done nothing else.

To load torch, and what an optimizer loads of it late, takes a core more than three seconds; to fork takes none. Who
has computed may not be forked, since threads of torch would be missing in the child; who only imports has no thread.
A rank sees what a fresh process sees: an environment, a session and standard streams of its own, no mark of earlier
jobs, and it ends as a script does. Neighbours come from different fork servers, lest the same hash seed give sets the
same order on all ranks.

python -m tests.support.processes.fork_server FD    takes requests from a socket until that is closed
"""

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[3]
ONE_THREAD = dict.fromkeys(["OMP_NUM_THREADS", "MKL_NUM_THREADS"], "1")
LOADED = ("tests.support.processes.rank", "gpipe.pipeline", "torch._dynamo")
SEEDS = 2
LONGEST = 1 << 17  # bytes of a request: an environment
SET_PARENT_DEATH_SIGNAL = 1


@dataclass
class Forked:
    """A process that a fork server has forked: what is needed here of `subprocess.Popen`."""

    pid: int  # of its session too
    stdin: TextIO
    _news: TextIO
    returncode: int | None = None  # a signal as its negative number; None while it is not known to have ended

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._news], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            self.returncode = int(self._news.readline() or -signal.SIGKILL)  # its keeper was killed with it
            self._news.close()
        return self.returncode


@dataclass
class ForkServer:
    """A process that forks ranks, for as long as this one lives."""

    _socket: socket.socket
    _popen: subprocess.Popen[bytes] = field(init=False)

    @classmethod
    def start(cls) -> "ForkServer":
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made = cls(own)
        with its:
            made._popen = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno()), str(os.getpid())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,
            )
        atexit.register(made.close)
        return made

    def fork(self, rank: int, folder: Path, log: TextIO, environment: Mapping[str, str]) -> Forked:
        """Starts a rank that serves as `rank.main` says, and writes what it prints to a log."""
        takes, stdin = os.pipe()
        news, tells = os.pipe()
        request = json.dumps([rank, str(folder), dict(environment)]).encode()
        socket.send_fds(self._socket, [request], [takes, log.fileno(), tells])
        os.close(takes)
        os.close(tells)
        told = open(news)  # noqa: SIM115  # for as long as the rank lives
        return Forked(int(told.readline()), open(stdin, "w"), told)

    def close(self) -> None:
        self._socket.close()
        self._popen.wait()


@cache
def fork_servers() -> tuple[ForkServer, ...]:
    return tuple(ForkServer.start() for _ in range(SEEDS))


def end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def forked(requests: socket.socket) -> tuple[int, str] | None:
    """Forks a rank for each request; returns in the rank, and here when there will be no more."""
    while True:
        request, (*files,), _, _ = socket.recv_fds(requests, LONGEST, 3)
        if not request:
            return None
        if os.fork() == 0:
            requests.close()
            rank, folder, environment = json.loads(request)
            keep(*files)
            os.environ.clear()
            os.environ.update(environment)
            return rank, folder
        for file in files:
            os.close(file)


def keep(stdin: int, log: int, tells: int) -> None:
    """Forks the rank, in which it returns; what is left of this process tells its number, and how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server, keeper = os.getppid(), os.getpid()
    end_with(server)
    pid = os.fork()
    if pid:
        os.close(stdin)
        os.write(tells, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(tells, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    end_with(keeper)
    os.setsid()
    for file, standard in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(file, standard)
    for file in (stdin, log, tells):
        os.close(file)


def main() -> None:
    end_with(int(sys.argv[2]))
    rank, *_ = map(import_module, LOADED)
    assert len(os.listdir("/proc/self/task")) == 1, (
        "what is imported has started a thread, which a fork does not copy"
    )
    gc.freeze()  # else each rank copies most of it when it ends, in 1.3 s instead of 0.4
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a keeper ends
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        given = forked(requests)
    if given is not None:
        tempfile.tempdir = None  # as the environment says
        rank.main(*given)


if __name__ == "__main__":
    main()
