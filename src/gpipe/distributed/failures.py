"""What a process reports to others of its failure, what they raise of it, and what others were last seen at.

That those of its host see in shared memory. Those of other hosts ask by a stream of its own, which a thread answers.
It does nothing else, so that it answers while layers run and while data is made; not while its process is stopped, or
something in it holds the interpreter's lock.
"""

import ctypes
import json
import math
import mmap
import select
import selectors
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple, NoReturn, Self, TypeAlias

from gpipe.distributed.codec import Gone, reading
from gpipe.distributed.connection import BLOCKED, Connection
from gpipe.errors import RemoteError, folded, received

SILENT_SECONDS = 2.5  # after which a host that should answer every second counts as out of reach
LONG_WAIT_SECONDS = 10.0  # after which a wait is warned of, once
REPORT_SECONDS = 1.0  # from the end of a process's connection until its own report of why, at most
LONGEST_TEXT = 20_000  # characters of a traceback, and of an exception's text
STILL = (
    "its process has not answered for {seconds:.1f} s, and its host does: it is stopped, or something in it holds "
    "the interpreter's lock; it is waited for"
)
BUSY = (
    "it is waited for, if it is busy there, as with data. Else: is the pipe called on every rank, in the same order?"
)
HANGS_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
QUESTION, ANSWER = b"?", struct.Struct("<cIiI?d")  # an answer: a sign, and a status, with its age in seconds
SIGN = b"="
MOST_BYTES = 2**12  # that are read at once


class Status(ctypes.Structure):
    """What a process is at, in memory that the other processes of its host can read: also when it is stuck or gone.

    Its run, its place in the actions (-1 outside) and since when, how many layers began there, whether it waits.
    """

    _fields_ = (
        ("run", ctypes.c_uint32),
        ("at", ctypes.c_int32),
        ("layers", ctypes.c_uint32),
        ("waits", ctypes.c_bool),
        ("since", ctypes.c_double),
    )

    @classmethod
    def shown_in(cls, folder: str) -> Self:
        """That of this process, as a file in a folder."""
        with open(f"{folder}/status", "x+b") as file:
            file.write(bytes(ctypes.sizeof(cls)))
            file.flush()
            shown = cls.from_buffer(mmap.mmap(file.fileno(), 0))
        shown.reach(0, -1)
        return shown

    @staticmethod
    def memory_in(folder: str) -> mmap.mmap:
        with open(f"{folder}/status", "rb") as file:
            return mmap.mmap(file.fileno(), ctypes.sizeof(Status), prot=mmap.PROT_READ)

    def reach(self, run: int, at: int) -> None:
        self.run, self.at, self.layers, self.waits, self.since = run, at, 0, False, time.monotonic()


Memory: TypeAlias = Status | mmap.mmap  # where a status stands


class Questions:
    """The processes of other hosts, as they answer this one: what each is at, and since when it owes an answer."""

    def __init__(self, streams: Mapping[int, socket.socket], status: Status) -> None:
        self.answers: dict[int, Status] = {}
        self.owed: dict[int, float] = {}
        self._streams, self._status = dict(streams), status
        self._come = {peer: bytearray() for peer in streams}  # of those that may answer
        self._lock = threading.Lock()  # what is encrypted no two threads can use at a time
        for stream in streams.values():
            stream.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="gpipe answers", daemon=True)
        if streams:
            self._thread.start()

    def ask(self) -> None:
        """Asks all, and waits for nobody."""
        with self._lock:
            for peer in self._come:
                self.owed.setdefault(peer, time.monotonic())
                _send(self._streams[peer], QUESTION)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer, stream in self._streams.items():
                selector.register(stream, selectors.EVENT_READ, peer)
            while selector.get_map():
                for key, _ in selector.select():
                    with self._lock:
                        if not self._take(key.data):
                            selector.unregister(key.fileobj)
                            del self._come[key.data]
                            self.owed.pop(key.data, None)

    def _take(self, peer: int) -> bool:
        """Answers what a process asks, and keeps what it answers; whether more may come."""
        stream, come = self._streams[peer], self._come[peer]
        try:
            while data := stream.recv(MOST_BYTES):  # those of ssl hold back what poll does not see
                come += data
                while come:
                    if come[:1] == QUESTION:
                        del come[:1]
                        _send(stream, self._answer())
                    elif come[:1] != SIGN:
                        return False  # nothing that gpipe sends
                    elif len(come) < ANSWER.size:
                        break
                    else:
                        self._keep(peer, *ANSWER.unpack_from(come)[1:])
                        del come[: ANSWER.size]
        except BLOCKED:
            return True
        except OSError:
            pass
        return False

    def _answer(self) -> bytes:
        shown = Status.from_buffer_copy(self._status)
        age = time.monotonic() - shown.since
        return ANSWER.pack(SIGN, shown.run, shown.at, shown.layers, shown.waits, age)

    def _keep(self, peer: int, run: int, at: int, layers: int, waits: bool, age: float) -> None:
        since = time.monotonic() - (age if math.isfinite(age) else 0.0)
        self.answers[peer] = Status(run, at, layers, waits, since)
        self.owed.pop(peer, None)

    def close(self) -> None:
        for end in self._streams.values():
            with suppress(OSError):  # it is closed already
                socket.socket.shutdown(end, socket.SHUT_RDWR)  # of which the thread ends
        if self._streams:
            self._thread.join(1.0)
        self.drop()

    def drop(self) -> None:
        for end in self._streams.values():
            end.close()


def _send(stream: socket.socket, data: bytes) -> None:
    with suppress(OSError, *BLOCKED):  # who reads nothing gets nothing
        stream.send(data)


class Report(NamedTuple):
    """What a process reports of a failure: the run (0: it leaves), the rank that failed, and its exception."""

    run: int
    rank: int
    type_name: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, run: int, rank: int, at: str = "") -> "Report":
        """The report of an exception, raised `at` what, in words; one of another process is passed on as it came."""
        if isinstance(error, RemoteError) and error.received:
            return cls(run, error.rank, error.type_name, str(error), error.traceback)
        said = "".join(traceback.format_exception_only(error)).strip()  # notes too, and nothing else raises
        if len(said) > LONGEST_TEXT:
            said = f"{said[: LONGEST_TEXT // 2]} [...] {said[-LONGEST_TEXT // 2 :]}"
        lines = traceback.format_exception(type(error), error, folded(error))
        message = f"rank {rank} failed{at and f' {at}'}: {said}"
        return cls(run, rank, type(error).__name__, message, "".join(lines)[-LONGEST_TEXT:])

    @classmethod
    def read(cls, written: bytes) -> "Report":
        match json.loads(written.decode("utf-8", "surrogatepass")):
            case [int(run), int(rank), str(type_name), str(message), str(text)]:
                return cls(run, rank, type_name, message, text)
        raise ValueError("another message")

    def write(self) -> bytes:
        """The report as it is sent: short enough for what a socket takes at once."""
        return json.dumps(self, ensure_ascii=False).encode("utf-8", "surrogatepass")

    def error(self) -> RemoteError:
        return received(self.message, self.rank, self.type_name, self.traceback)


class FailureDetector:
    """The other processes of a pipe, as one of them knows them: who failed, who is gone, who was last seen where."""

    def __init__(
        self, connections: Mapping[int, Connection], shared: Mapping[int, Memory], limit: float, questions: Questions
    ) -> None:
        self.run = 0  # the number of the current one
        self.sees: Callable[[int, Status], str] = in_no_step  # says in words what a peer was last seen at
        self.limit = limit  # seconds to wait for one
        self._connections = connections
        self._reports: list[Report] = []
        self._ends: dict[int, str] = {}  # of who is gone, as it was first seen
        self._shared = shared  # what those of this host are at
        self._questions = questions

    def check(self, needed: Collection[int]) -> list[int]:
        """Reads the control channels, and raises a failure of this run; gives who is gone and not needed any more."""
        for peer, connection in self._connections.items():
            with reading("a report", peer):
                reports = [Report.read(message) for message in connection.control.read() if message]
            self._reports += reports
            self._ends.update((peer, report.message) for report in reports if not report.run)
        self._reports = [report for report in self._reports if report.run >= self.run]
        failed = [report for report in self._reports if report.run == self.run]
        gone = [peer for peer, connection in self._connections.items() if connection.control.gone]
        for peer in gone if not any(report.type_name for report in failed) else ():
            self._ends.setdefault(peer, f"rank {peer} is gone; {self.last_seen(peer, gone=True)}")
        if failed:
            raise failed[0].error()
        if missed := [peer for peer in gone if peer in needed]:
            silent = [peer for peer in self.silent(SILENT_SECONDS) if peer not in missed]
            raise received("\n".join([self._ends[peer] for peer in missed] + self.all_last_seen(silent)), missed[0])
        return gone

    def raise_lost(self, peer: int, gone: Gone | None = None) -> NoReturn:
        """Raises why a stream ended: a report says it, or soon will; or nobody is gone, and it is this device."""
        self.check(self._connections)
        channel = select.poll()
        channel.register(self._connections[peer].control.socket, select.POLLIN)
        channel.poll(REPORT_SECONDS * 1000)
        self.check(self._connections)
        if gone is not None and isinstance(gone.__cause__, RuntimeError):  # the backend's
            raise gone.__cause__
        raise received(f"rank {peer} is gone; {self.last_seen(peer, gone=True)}", peer)

    def raise_timeout(self, peer: int) -> NoReturn:
        """Gives up waiting for a process; names who keeps all waiting, as far as that can be seen."""
        stuck = self.stuck(peer)
        why = f"nothing came for {self.limit:g} s, the timeout of the process group"
        raise received("\n".join([why, *self.all_last_seen(stuck)]), stuck[0])

    def stuck(self, peer: int) -> list[int]:
        """Who keeps all waiting, as far as that can be seen, while this process waits for `peer`."""
        active = {rank for rank, memory in self._known().items() if not Status.from_buffer_copy(memory).waits}
        return self.silent(SILENT_SECONDS) or sorted({*active, *self._questions.owed.copy()}) or [peer]

    def _known(self) -> dict[int, Memory]:
        return {**self._questions.answers.copy(), **self._shared}

    def silent(self, seconds: float) -> list[int]:
        """Those whose hosts have answered nothing for longer. Any thread may ask."""
        return [peer for peer, connection in self._connections.items() if connection.control.silent > seconds]

    def all_last_seen(self, peers: Collection[int]) -> list[str]:
        return [f"rank {peer}: {self.last_seen(peer)}" for peer in peers]

    def last_seen(self, peer: int, *, gone: bool = False) -> str:
        """In words, where a process was when it was last seen in this run, or when it ended."""
        known, owed = self._known(), self._questions.owed.copy()
        if peer not in self._shared:
            if (silent := self._connections[peer].control.silent) > SILENT_SECONDS:
                return f"it cannot be reached: its host has not answered for {silent:.1f} s"
            if peer in owed and not gone:
                return STILL.format(seconds=time.monotonic() - owed[peer])
            if gone or peer not in known:
                return f"it is on {self._connections[peer].host}: see its own messages"
        seen = Status.from_buffer_copy(known[peer])
        seconds = time.monotonic() - seen.since
        if seen.run == self.run and seen.at >= 0:
            return f"it was last seen {self.sees(peer, seen)}\n    and that for {seconds:.1f} s"
        where = f"outside of any step, after {seen.run} run{'s' * (seen.run != 1)}"
        if gone:
            return f"it ended {where}"
        return f"it was last seen {where}, and that for {seconds:.1f} s, while this is run {self.run}: {BUSY}"

    def gone(self) -> list[int]:
        """Those whose ends of the connections are closed. Any thread may ask."""
        poll = select.poll()
        peers = {connection.control.socket.fileno(): peer for peer, connection in self._connections.items()}
        for handle in peers.keys() - {-1}:
            poll.register(handle, HANGS_UP)
        return sorted(peers[handle] for handle, _ in poll.poll(0))


def in_no_step(peer: int, seen: Status) -> str:
    """What a process is at while none of the words of a step hold."""
    return "outside of any step"
