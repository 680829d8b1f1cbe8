"""Tests over processes: starts ranks, has them do a job, and ends every one of them, whatever happened.

Each rank is a process in a session of its own, in which torch is loaded and nothing else was done (`fork_server`).
They meet at a file in a folder of mode 0700, talk over the loopback device, compute on one thread each, and die with
who started them.
"""

import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, TypeAlias

from tests.support.processes.fork_server import ONE_THREAD, Forked, fork_servers
from tests.support.processes.marks import first_mark
from tests.support.processes.outcome import HungError, Outcome
from tests.support.processes.rank import Order
from tests.support.progress import TICK, Progress, stat_of

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
GRACE, STUCK, HEARD = 2.0, 0.5, 60.0
TIMEOUT = 600.0  # seconds that a group waits: who is done has not waited for it

Job: TypeAlias = str | Callable[..., object]
"""A function of (rank, world, *args) at the top of a module, or its `module:name`."""


def run_ranks(world: int, job: Job, *args: Any, **how: Any) -> list[Outcome]:
    """Runs a job in fresh processes, which end with it as a user's script would; gives how each rank ended.

    Takes what `WorkerPool.run` does.
    """
    with WorkerPool(world) as pool:
        return pool.run(job, *args, last=True, **how)


@dataclass
class _Process:
    """A rank's process, and what is known of the job that it does."""

    popen: Forked
    log: Path
    begun: int = 0  # how long the log was when the job began
    ended: float | None = None
    hung: bool = False
    left: bool = False

    def signal(self, number: int) -> None:
        """To the process and all that it started, unless it has ended and been waited for."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def has_left_others(self) -> bool:
        try:
            os.killpg(self.popen.pid, 0)
        except ProcessLookupError:
            return False
        return True


@dataclass
class WorkerPool:
    """Ranks that do one job after another, and keep what these have loaded: use it as a context.

    The processes are started by the first job, and anew after a job in which one died or hung. Each job has a
    process group of its own. A job that kills a rank says more with fresh processes: see `run_ranks`.
    """

    size: int
    _folder: TemporaryDirectory[str] = field(default_factory=lambda: TemporaryDirectory(prefix="ranks-"))
    _processes: list[_Process] = field(default_factory=list)
    _jobs: int = 0

    def run(
        self,
        job: Job,
        *args: Any,
        world: int | None = None,
        timeout: float = TIMEOUT,
        join: bool = True,
        stuck: Collection[int] = (),
        last: bool = False,
    ) -> list[Outcome]:
        """Has the first `world` ranks do a job; gives how it ended on each.

        Args:
            job: What to do.
            args: JSON values for it.
            world: How many ranks; all by default.
            timeout: Seconds that the process group waits for a message.
            join: Whether the ranks find a process group made; else the environment says how to make one.
            stuck: Ranks that are meant to hang: they are killed half a second after the others have ended.
            last: Whether the processes end with the job.

        Raises:
            HungError: A rank that is not meant to hang was not done when all stood still.
        """
        ranks = self._ready()[: world or self.size]
        self._jobs += 1
        folder = Path(self._folder.name, f"job_{self._jobs}")
        folder.mkdir(mode=0o700)
        name = job if isinstance(job, str) else f"{job.__module__}:{job.__qualname__}"
        order = Order(name, args, len(ranks), str(folder), free_port(), timeout, join, last)
        try:
            _tell(ranks, order)
            in_time = _await(ranks, folder, stuck, last=last)
            outcomes = list(_outcomes(ranks, folder))
        except BaseException:  # a test's own time limit, or Ctrl-C
            self._end(0)
            raise
        if any(rank.hung or rank.popen.poll() is not None for rank in ranks):
            self._end(0)
        if not in_time:
            raise HungError(outcomes)
        return outcomes

    def _ready(self) -> list[_Process]:
        if any(process.popen.poll() is not None for process in self._processes):
            self._end(0)
        if not self._processes:
            self._processes = [_start(rank, Path(self._folder.name)) for rank in range(self.size)]
        _await_start(self._processes)
        return self._processes

    def _end(self, grace: float) -> None:
        """Ends all processes; those that are not at work end by themselves."""
        for process in self._processes:
            with suppress(OSError):
                process.popen.stdin.close()
        until = time.monotonic() + grace
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, until - time.monotonic()))
            process.signal(signal.SIGKILL)
            process.popen.wait()
        self._processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(GRACE)
        self._folder.cleanup()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(rank: int, folder: Path) -> _Process:
    log = folder / f"rank_{rank}.log"
    with log.open("w") as stream:
        fork_server = fork_servers()[rank % len(fork_servers())]
        popen = fork_server.fork(rank, folder, stream, {**os.environ, **ONE_THREAD, **LOOPBACK})
    return _Process(popen, log)


def _await_start(processes: Sequence[_Process]) -> None:
    """Waits until all can do a job; one that ends before is an outcome of the job that it never does."""
    progress = Progress([process.popen.pid for process in processes])
    while not all(_is_ready(process) or process.popen.poll() is not None for process in processes):
        if progress.stands_still():
            raise TimeoutError(f"not all of {len(processes)} ranks have started, and none gets on")
        time.sleep(TICK)


def _is_ready(process: _Process) -> bool:
    return process.log.with_name(f"ready_{process.popen.pid}").exists()


def _tell(ranks: Sequence[_Process], order: Order) -> None:
    for process in ranks:
        process.begun, process.ended, process.left = process.log.stat().st_size, None, False
        with suppress(BrokenPipeError):  # it has ended, and that is an outcome
            process.popen.stdin.write(json.dumps(asdict(order)) + "\n")
            process.popen.stdin.flush()


def _await(ranks: Sequence[_Process], folder: Path, stuck: Collection[int], *, last: bool) -> bool:
    """Waits until all are done who shall be; kills the others. Says whether it was in time."""
    due = [rank for rank in range(len(ranks)) if rank not in stuck]
    in_time = _wait_for(ranks, due, folder, math.inf, last=last)
    _wait_for(ranks, range(len(ranks)), folder, STUCK if in_time else 0, last=last)
    for process in ranks:
        process.hung = process.ended is None
    _ask_where([process for process in ranks if process.hung])
    if last:
        _wait_for_families(ranks)
    for process in ranks:
        if process.hung or process.left:
            process.signal(signal.SIGKILL)
    return in_time


def _ask_where(hung: Sequence[_Process]) -> None:
    """Has ranks that hang write down where they are, unless they are stopped and say nothing."""
    sizes = [process.log.stat().st_size for process in hung]
    for process in hung:
        process.signal(signal.SIGUSR1)
    until = time.monotonic() + HEARD
    for process, size in zip(hung, sizes, strict=True):
        while process.log.stat().st_size == size and not _is_stopped(process) and time.monotonic() < until:
            time.sleep(TICK)
    time.sleep(0.3 * bool(hung))  # while they write the rest


def _is_stopped(process: _Process) -> bool:
    words = stat_of(process.popen.pid)
    return not words or words[0] in "TZ"


def _wait_for(ranks: Sequence[_Process], due: Collection[int], folder: Path, limit: float, *, last: bool) -> bool:
    until = time.monotonic() + limit
    progress = Progress([process.popen.pid for process in ranks])
    while True:
        for rank, process in enumerate(ranks):
            done = process.popen.poll() is not None or (not last and (folder / f"rank_{rank}.json").exists())
            if done and process.ended is None:
                process.ended = time.monotonic()
        if all(ranks[rank].ended is not None for rank in due):
            return True
        if time.monotonic() > until or progress.stands_still():
            return False
        time.sleep(TICK)


def _wait_for_families(ranks: Sequence[_Process]) -> None:
    until = time.monotonic() + GRACE
    for process in ranks:
        while not process.hung and (left := process.has_left_others()) and time.monotonic() < until:
            time.sleep(TICK)
        process.left = not process.hung and left


def _outcomes(ranks: Sequence[_Process], folder: Path) -> Iterator[Outcome]:
    marked = first_mark(folder)
    for rank, process in enumerate(ranks):
        file = folder / f"rank_{rank}.json"
        record = json.loads(file.read_text()) if file.exists() else {}
        at = record.pop("raised", process.ended)
        yield Outcome(
            rank,
            None if process.hung else process.popen.poll(),
            process.hung,
            marked=marked,
            seconds=None if marked is None or at is None else at - marked,
            stderr=process.log.read_bytes()[process.begun :][-20_000:].decode(errors="replace"),
            left=process.left,
            **record,
        )
