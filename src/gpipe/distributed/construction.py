"""While a pipe is built: what all processes must know of each other, and that none waits for one that has failed.

Each record says what its process does next. So who is gone, or says nothing, was at what it said last.
"""

import json
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from gpipe.distributed.failures import LONG, SILENCE, Report, error_of, report_of
from gpipe.distributed.local import checked_report
from gpipe.distributed.meeting import meet
from gpipe.distributed.mesh import Position, default_device, timeout_of_world
from gpipe.distributed.untrusted import Damaged, damaged, reading
from gpipe.errors import RemoteError, heard

logger = logging.getLogger("gpipe")

COMING = "before it came to build the pipe, or as it began"
SETTLING = "while it settled what the pipe is made of"
BUILDING = "while it built its layers"
LINKING = "while the processes linked up"
ALL_TOLD = 0.2  # seconds from the first bad news on in which a better reason may come


class Agreement:
    """Talks of the processes that build one pipe, each a dict of JSON from everyone. All hold it at the same time.

    Whoever fails in it tells the others, who raise a RemoteError of it wherever they wait.

    Attributes:
        position: Where this process stands, once that is known.
        hosts: The host of each process of the world, once all have greeted.
    """

    def __init__(self) -> None:
        self.position: Position | None = None
        self.hosts: list[str] = []
        self._timeout = timeout_of_world()
        self._began = time.monotonic()
        self._own = dist.get_rank()
        self._at = COMING
        self._told: dict[int, deque[Mapping[str, Any]]] = {
            peer: deque() for peer in range(dist.get_world_size()) if peer != self._own
        }
        self._theirs = dict.fromkeys(self._told, COMING)  # what they are at
        self._bad: list[Report] = []
        self._meeting = meet(default_device())

    @property
    def rank(self) -> int:
        """The number of this process, in the pipe if that is known."""
        return self._number(self._own)

    @property
    def size(self) -> int:
        """How many processes the pipe has, or the world as long as it has none."""
        return len(self._told) + 1 if self.position is None else len(self.position.members)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            known = isinstance(error, RemoteError) and error.heard
            report = {"failed": report_of(error, 0, self._number(self._own), self._at)}
            self._meeting.leave(json.dumps(report).encode(), known=known)

    def greet(self, **told: Any) -> list[Mapping[str, Any]]:
        """Begins: what each process of the world told here, by its number there."""
        versions = f"gpipe {_version('gpipe')}, torch {_version('torch')}"
        every = self._tell_world(SETTLING, False, {"host": _host(), "versions": versions, **told})
        self.hosts = [theirs["host"] for theirs in every]
        _refuse_other_versions([theirs["versions"] for theirs in every])
        return every

    def tell(self, next_at: str, *, last: bool = False, **told: Any) -> list[Mapping[str, Any]]:
        """What each process of the pipe told here, by rank; `next_at` says in words what this one goes on with."""
        assert self.position is not None
        every = self._tell_world(next_at, last, told)
        return [every[member] for member in self.position.members]

    def _tell_world(self, next_at: str, last: bool, told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        self._meeting.tell(json.dumps({"next": next_at, "told": told}).encode(), last=last)
        until, tells_at = time.monotonic() + self._timeout, time.monotonic() + LONG
        while missing := [peer for peer, records in self._told.items() if not records]:
            if self._hear(min(until, tells_at) - time.monotonic()):
                continue
            seconds = self._timeout if time.monotonic() >= until else LONG
            silent = "\n".join(self._why_silent(peer, seconds) for peer in missing)
            if seconds == self._timeout:
                raise heard(silent, self._number(missing[0]))
            logger.warning(silent)
            tells_at = math.inf
        self._at = next_at
        every = {peer: records.popleft() for peer, records in self._told.items()} | {self._own: told}
        if last:
            self._meeting.part(self._timeout)
        return [every[peer] for peer in range(len(every))]

    def heed(self, seconds: float = 0.0) -> None:
        """Looks whether another process failed; waits so many seconds for the news."""
        until = time.monotonic() + seconds
        while self._hear(until - time.monotonic()):
            pass

    def _hear(self, seconds: float) -> bool:
        """Takes the next of what was told, if it comes in so many seconds; whether it did."""
        try:
            peer, record = self._meeting.heard.get(timeout=max(seconds, 0.0))
        except Empty:
            return False
        try:
            bad = self._gone(peer) if record is None else self._note(peer, record)
        except Damaged as error:
            raise damaged(self._number(peer), error) from error
        if bad is not None:
            self._bad.append(bad)
            if len(self._bad) == 1:
                self._raise_best()
        return True

    def _note(self, peer: int, record: bytes) -> Report | None:
        """Reads a record; gives the report of a failure, if it is that."""
        with reading("a record"):
            said: dict[str, Any] = json.loads(record.decode())
            if "failed" in said:
                return checked_report(said["failed"])
            if not isinstance(said["told"], dict) or not isinstance(said["next"], str):
                raise TypeError(f"{sorted(said)}")
            self._told[peer].append(said["told"])
            self._theirs[peer] = said["next"]
        return None

    def _raise_best(self) -> None:
        """Raises the failure that a process told itself, if one comes soon; else names who is gone."""
        until = time.monotonic() + ALL_TOLD
        while self._hear(until - time.monotonic()):
            pass
        told = [report for report in self._bad if report["type"]]
        raise error_of(told[0] if told else self._bad[0])

    def _gone(self, peer: int) -> Report:
        message = f"rank {self._number(peer)} is gone; it ended {self._theirs[peer]}"
        if self._theirs[peer] == COMING and time.monotonic() - self._began > SILENCE:  # gloo sounds alike then
            message += (
                ". Or it lives, and a collective that it waits in timed out: is GPipe(...) called on every rank?"
            )
        return {"run": 0, "rank": self._number(peer), "type": "", "message": message, "traceback": ""}

    def _why_silent(self, peer: int, seconds: float) -> str:
        last = self._theirs[peer].removeprefix("while ")
        limit = ", the timeout of the process group" if seconds == self._timeout else ""
        return f"rank {self._number(peer)} said nothing for {seconds:g} s{limit}; last known: {last}"

    def _number(self, member: int) -> int:
        """The rank of a process of the world in the pipe, if it is known there."""
        known = () if self.position is None else self.position.members
        return known.index(member) if member in known else member

    def exchange(self, message: bytes, /) -> list[bytes]:
        """Sends a message to all processes of the pipe, and gathers those of all, by rank."""
        return [theirs["message"].encode() for theirs in self.tell(LINKING, message=message.decode())]

    def gone(self) -> tuple[int, ...]:
        """None that is known: who is gone ends the agreement."""
        return ()


def _refuse_other_versions(versions: Sequence[str]) -> None:
    first = {version: versions.index(version) for version in versions}
    if len(first) > 1:
        found = ", ".join(f"{version} (rank {rank})" for version, rank in first.items())
        raise ValueError(f"the processes run different versions: {found}; install the same everywhere")


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
