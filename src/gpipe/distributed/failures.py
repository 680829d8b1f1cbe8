"""What a process reports to the others of its failure, what they raise of it, and where they last saw who is silent.

What a process is at, for the others of its host to see: also when it is stuck or gone, and can say nothing.
"""

import mmap
import select
import struct
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn, TypeAlias

from gpipe.distributed.connection import Connection
from gpipe.distributed.frames import Damaged, Gone, damaged
from gpipe.errors import RemoteError, folded, heard

_STATUS = struct.Struct("<IiI?d")
_LAYERS_OFFSET, _WAITS_OFFSET = 8, 12  # where these stand in it


class Seen(NamedTuple):
    """A process's run, its place in the actions (-1 outside), layers begun there, whether it waits, since when."""

    run: int
    at: int
    layers: int
    waits: bool
    since: float

    @classmethod
    def read(cls, memory: mmap.mmap) -> "Seen":
        """What a process notes in such memory just now."""
        return cls(*_STATUS.unpack_from(memory))


class Status:
    """A process's own words on what it is at, in memory that the others of its host can read: a file in a folder."""

    def __init__(self, folder: str | None = None) -> None:
        if folder is None:
            self.memory = mmap.mmap(-1, _STATUS.size)
        else:
            with open(f"{folder}/status", "x+b") as file:
                file.write(bytes(_STATUS.size))
                file.flush()
                self.memory = mmap.mmap(file.fileno(), _STATUS.size)
        self.layers = memoryview(self.memory)[_LAYERS_OFFSET : _LAYERS_OFFSET + 4].cast("I")  # [0]: how many began

    @staticmethod
    def of_other(folder: str) -> mmap.mmap:
        """What a process of this host shows in its folder."""
        with open(f"{folder}/status", "rb") as file:
            return mmap.mmap(file.fileno(), _STATUS.size, prot=mmap.PROT_READ)

    def reach(self, run: int, at: int) -> None:
        """Notes a place among the actions."""
        _STATUS.pack_into(self.memory, 0, run, at, 0, False, time.monotonic())

    def wait(self, waits: bool) -> None:
        """Notes whether this process waits for another."""
        self.memory[_WAITS_OFFSET] = waits


Report: TypeAlias = Mapping[str, Any]
"""In words of JSON: the run, the rank that failed, its exception's type, message and traceback."""

SILENT_SECONDS = 2.5  # after which a host that should answer every second counts as out of reach
LONG_WAIT_SECONDS = 10.0  # after which a wait is warned of, once
REPORT_SECONDS = 1.0  # from the end of a process's connection until its own report of why, at most
LONGEST_TEXT = 20_000  # characters of a traceback, and of an exception's text
HANGS_UP = getattr(select, "POLLRDHUP", select.POLLHUP)


def report_of(error: BaseException, run: int, rank: int, at: str = "") -> Report:
    """What to report of an exception; one that came from another process is passed on, so that all report the same.

    `at` says in words when it was raised, if that is not in its notes.
    """
    if isinstance(error, RemoteError) and error.heard:
        passed_on = {"rank": error.rank, "type": error.type_name, "message": str(error), "traceback": error.traceback}
        return {"run": run, **passed_on}
    said = "".join(traceback.format_exception_only(error)).strip()  # notes too, and nothing else raises
    return {
        "run": run,
        "rank": rank,
        "type": type(error).__name__,
        "message": f"rank {rank} failed{at and f' {at}'}: {_shortened(said)}",
        "traceback": "".join(traceback.format_exception(type(error), error, folded(error)))[-LONGEST_TEXT:],
    }


def error_of(report: Report) -> RemoteError:
    """What to raise of a report."""
    return heard(report["message"], report["rank"], report["type"], report["traceback"])


class FailureDetector:
    """The other processes of a pipe, as one of them knows them: who failed, who is gone, who was last seen where.

    Attributes:
        run: The number of the current run.
        sees: Says in words what a peer was last seen at.
    """

    def __init__(self, links: Mapping[int, Connection], shared: Mapping[int, mmap.mmap], limit: float) -> None:
        self.run = 0
        self.sees: Callable[[int, Seen], str] = in_no_step
        self.limit = limit  # seconds to wait for one
        self._links = links
        self._shared = shared  # what those of this host are at

    def check(self, needed: Collection[int]) -> list[int]:
        """Reads the control channels, and raises a failure of this run; gives who is gone and not needed any more."""
        for peer, link in self._links.items():
            try:
                link.listen()
            except Damaged as error:
                raise damaged(peer, error) from error
            link.reports = [report for report in link.reports if report["run"] >= self.run]
        for link in self._links.values():
            for report in link.reports:
                if report["run"] == self.run:
                    raise error_of(report)
        gone = [peer for peer, link in self._links.items() if link.control.gone]
        if missed := [peer for peer in gone if peer in needed]:
            silent = [peer for peer in self._silent() if peer not in missed]
            last = [f"rank {peer} is gone; {self.last_seen(peer, gone=True)}" for peer in missed]
            raise heard("\n".join(last + self.all_last_seen(silent)), missed[0])
        return gone

    def raise_lost(self, peer: int, gone: Gone | None = None) -> NoReturn:
        """Raises why a stream ended: a report says it, or soon will; or nobody is gone, and it is this device."""
        self.check(self._links)
        channel = select.poll()
        channel.register(self._links[peer].control.connection, select.POLLIN)
        channel.poll(REPORT_SECONDS * 1000)
        self.check(self._links)
        if gone is not None and isinstance(gone.__cause__, RuntimeError):  # the backend's
            raise gone.__cause__
        raise heard(f"rank {peer} is gone; {self.last_seen(peer, gone=True)}", peer)

    def raise_timeout(self, peer: int) -> NoReturn:
        """Gives up waiting for a process; names who keeps all waiting, as far as that can be seen."""
        stuck = self.stuck(peer)
        why = f"nothing came for {self.limit:g} s, the timeout of the process group"
        raise heard("\n".join([why, *self.all_last_seen(stuck)]), stuck[0])

    def stuck(self, peer: int) -> list[int]:
        """Who keeps all waiting, as far as that can be seen, while this process waits for `peer`."""
        return (
            self._silent() or [rank for rank, memory in self._shared.items() if not Seen.read(memory).waits] or [peer]
        )

    def _silent(self) -> list[int]:
        return [peer for peer, link in self._links.items() if link.silent > SILENT_SECONDS]

    def all_last_seen(self, peers: Collection[int]) -> list[str]:
        """In words, where some processes were last seen, a line each or more."""
        return [f"rank {peer}: {self.last_seen(peer)}" for peer in peers]

    def last_seen(self, peer: int, *, gone: bool = False) -> str:
        """In words, where a process was when it was last seen in this run, or when it ended."""
        silent = self._links[peer].silent
        if peer not in self._shared and silent > SILENT_SECONDS:
            return f"it cannot be reached: its host has not answered for {silent:.1f} s"
        if peer not in self._shared:
            return "it is on another host: see its own messages"
        seen = Seen.read(self._shared[peer])
        if gone and (seen.run < self.run or seen.at < 0):
            return f"it ended outside of any step, after {seen.run} run{'s' * (seen.run != 1)}"
        if seen.run < self.run or seen.at < 0:
            where = f"it was last seen outside of any step, after {seen.run} runs, while this is run {self.run}"
            return f"{where}: is the pipe called on every rank, in the same order?"
        return f"it was last seen {self.sees(peer, seen)}\n    and that for {time.monotonic() - seen.since:.1f} s"

    def report(self, report: Report) -> None:
        """Tells all of a failure."""
        for link in self._links.values():
            link.report(report)

    def gone(self) -> list[int]:
        """Those whose ends of the links are closed. Any thread may ask."""
        found = []
        for peer, link in self._links.items():
            seen, handle = select.poll(), link.control.connection.fileno()
            if handle >= 0:
                seen.register(handle, HANGS_UP)
                found += [peer] * bool(seen.poll(0))
        return found


def in_no_step(peer: int, seen: Seen) -> str:
    """What a process is at while none of the words of a step hold."""
    return "outside of any step"


def _shortened(text: str) -> str:
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]} [...] {text[-half:]}"
