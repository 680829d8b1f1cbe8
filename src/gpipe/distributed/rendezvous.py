"""While a pipe is built: the processes come together and settle what it is, and none waits for one that has failed.

All go through the same phases and exchange something at the end of each. So who is gone, or sends nothing, is in the
phase in which the others wait for it.
"""

import json
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from gpipe.distributed.agree import agree
from gpipe.distributed.connection import checked_report
from gpipe.distributed.failures import LONG_WAIT_SECONDS, SILENT_SECONDS, Report, error_of, report_of
from gpipe.distributed.frames import Damaged, damaged, reading
from gpipe.distributed.mesh import Position, timeout_of_world
from gpipe.distributed.world import Kind, Received, WorldChannel
from gpipe.errors import heard

logger = logging.getLogger("gpipe")

COMING = "before it came to build the pipe, or as it began"
SETTLING = "while it settled what the pipe is made of"
BUILDING = "while it built its layers"
LINKING = "while the processes linked up"
BETTER_REASON_SECONDS = 0.2  # from the first bad news on, in which a better reason may come


class Rendezvous:
    """A communicator of the processes that build one pipe; `with` it, whoever fails inside tells the others.

    They raise a RemoteError of it wherever they wait.

    Attributes:
        position: Where this process stands, once that is known; until then it exchanges with the whole world.
        hosts: The host of each process of the world, once all have greeted.
        phase: What this process does now, in words.
    """

    def __init__(self) -> None:
        self.position: Position | None = None
        self.hosts: list[str] = []
        self.phase = COMING
        self._rank_in_world = dist.get_rank()
        self._timeout = timeout_of_world()
        self._began = time.monotonic()
        self._messages: dict[int, deque[bytes]] = {
            peer: deque() for peer in range(dist.get_world_size()) if peer != self._rank_in_world
        }
        self._failures: list[Report] = []
        self._channel = WorldChannel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            report = report_of(error, 0, self.rank, self.phase)
            self._channel.send(json.dumps(report).encode(), Kind.FAILURE)
            self._channel.close()

    @property
    def rank(self) -> int:
        """The number of this process, in the pipe if that is known."""
        return self._number(self._rank_in_world)

    @property
    def size(self) -> int:
        """How many processes the pipe has, or the world as long as it has none."""
        return len(self._members)

    @property
    def _members(self) -> Sequence[int]:
        return range(len(self._messages) + 1) if self.position is None else self.position.members

    def _number(self, member: int) -> int:
        """The rank of a process of the world in the pipe, if it is known there."""
        return self._members.index(member) if member in self._members else member

    def gone(self) -> tuple[int, ...]:
        """None that is known: who is gone ends the rendezvous."""
        return ()

    def greet(self, value: Any = None) -> list[Any]:
        """Begins: gathers a value from each process of the world, by its number there; all run the same versions."""
        installed = f"gpipe {_version('gpipe')}, torch {_version('torch')}"
        position, self.position = self.position, None
        try:
            gathered = agree(self, {"host": _host(), "value": value}, same={"what is installed": installed})
        finally:
            self.position = position
        self.hosts = [remote["host"] for remote in gathered]
        self.phase = SETTLING
        return [remote["value"] for remote in gathered]

    def exchange(self, message: bytes, /) -> list[bytes]:
        """Sends a message to all processes of the pipe, and gathers those of all, by rank."""
        return self._exchange(message, Kind.VALUE)

    def close(self) -> None:
        """Ends it, once all have come to its end."""
        self._exchange(b"-", Kind.LAST)
        self._channel.close(self._timeout)

    def _exchange(self, message: bytes, kind: Kind) -> list[bytes]:
        self._channel.send(message, kind)
        until, warns_at = time.monotonic() + self._timeout, time.monotonic() + LONG_WAIT_SECONDS
        while missing := [peer for peer, messages in self._messages.items() if not messages]:
            if self._receive(min(until, warns_at) - time.monotonic()):
                continue
            if time.monotonic() >= until:
                limit = f"{self._timeout:g} s, the timeout of the process group"
                raise heard(self._silent(missing, limit), self._number(missing[0]))
            logger.warning(self._silent(missing, f"{LONG_WAIT_SECONDS:g} s"))
            warns_at = math.inf
        gathered = {peer: messages.popleft() for peer, messages in self._messages.items()}
        gathered[self._rank_in_world] = message
        return [gathered[member] for member in self._members]

    def _silent(self, peers: Sequence[int], seconds: str) -> str:
        last = self.phase.removeprefix("while ")
        return "\n".join(
            f"rank {self._number(peer)} said nothing for {seconds}; last known: {last}" for peer in peers
        )

    def check(self, seconds: float = 0.0) -> None:
        """Raises if another process has failed, or does so in so many seconds."""
        until = time.monotonic() + seconds
        while self._receive(until - time.monotonic()):
            pass

    def _receive(self, seconds: float) -> bool:
        """Takes the next message, if it comes in so many seconds; whether it did."""
        try:
            received = self._channel.received.get(timeout=max(seconds, 0.0))
        except Empty:
            return False
        failure = self._failure(received)
        if failure is not None:
            self._failures.append(failure)
            if len(self._failures) == 1:
                self._raise_best()
        elif received.message is not None:
            self._messages[received.peer].append(received.message)
        return True

    def _failure(self, received: Received) -> Report | None:
        """The failure that a message tells of, if it does."""
        peer = self._number(received.peer)
        if received.message is None:
            message = f"rank {peer} is gone; it ended {self.phase}"
            if self.phase == COMING and time.monotonic() - self._began > SILENT_SECONDS:  # gloo reports both alike
                message += (
                    ". Or it lives, and a collective that it waits in timed out: is GPipe(...) called on every rank?"
                )
            return {"run": 0, "rank": peer, "type": "", "message": message, "traceback": ""}
        if received.kind is not Kind.FAILURE:
            return None
        try:
            with reading("a report"):
                return checked_report(json.loads(received.message.decode()))
        except Damaged as error:
            raise damaged(peer, error) from error

    def _raise_best(self) -> None:
        """Raises the failure that a process reports itself, if one comes soon; else names who is gone."""
        self.check(BETTER_REASON_SECONDS)
        reported = [report for report in self._failures if report["type"]]
        raise error_of(reported[0] if reported else self._failures[0])


def _host() -> str:
    """What is the same for processes that share memory and a network."""
    named: list[Callable[[], str]] = [
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/net"),
        lambda: os.readlink("/proc/self/ns/mnt"),
    ]
    parts = [socket.gethostname()]
    for name in named:
        try:
            parts.append(name())
        except OSError:
            continue
    return " ".join([*parts, str(os.getuid())])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
