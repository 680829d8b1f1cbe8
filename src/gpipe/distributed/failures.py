"""Detects and reports failures of processes, with the last known action of each process.

Processes on the same host read each other's status from shared memory. Between hosts, processes query the status
through a separate stream, and a thread answers. The thread can answer while layers or data loading run, but not while
its process is stopped or other code holds the GIL.
"""

import ctypes
import json
import math
import os
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

import torch

from gpipe.distributed.codec import PeerClosed, decoding
from gpipe.distributed.connection import BLOCKED, Connection
from gpipe.errors import RemoteError, received_error, user_traceback

SILENT_SECONDS = 2.5  # a host, which is probed every second, counts as unreachable after this time
LONG_WAIT_SECONDS = 10.0  # a wait of this length causes one warning
REPORT_SECONDS = 1.0  # how long to wait for the report of a process after its connection has ended
LONGEST_TEXT = 20_000  # characters of a traceback, and of an exception's text
STUCK = (
    "it has not answered for {seconds:.1f} s, although its host does. The process is stopped, or its code holds the "
    "GIL. The other ranks keep waiting."
)
BUSY = (
    "The other ranks keep waiting, in case it is busy, for example with data. If not, check that every rank calls "
    "the pipe, in the same order."
)
HANGS_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
QUESTION, ANSWER = b"?", struct.Struct("<cIiI?d")  # an answer: `SIGN` and a status, with its age in seconds
SIGN = b"="
READ_BYTES = 2**12


class Status(ctypes.Structure):
    """The status of a process, in shared memory. Other processes on its host can read it even after the process ends.

    Attributes:
        run: The number of the current run.
        at: The index of the current action, or -1 outside the actions.
        layers: The number of layers that have begun in the current action.
        waits: Whether the process waits for another process.
        since: The time at which the current action began, in seconds of `time.monotonic()`.
    """

    _fields_ = (
        ("run", ctypes.c_uint32),
        ("at", ctypes.c_int32),
        ("layers", ctypes.c_uint32),
        ("waits", ctypes.c_bool),
        ("since", ctypes.c_double),
    )

    @classmethod
    def create_in(cls, folder: str) -> Self:
        """Creates the status of this process in a new memory-mapped file in a folder."""
        with open(f"{folder}/status", "xb") as file:
            file.write(bytes(ctypes.sizeof(cls)))
        status = cls.from_buffer(map_status(folder))
        status.reach(0, -1)
        return status

    def reach(self, run: int, at: int) -> None:
        """Records that the process begins an action."""
        self.run, self.at, self.layers, self.waits, self.since = run, at, 0, False, time.monotonic()


StatusMemory: TypeAlias = Status | memoryview


def map_status(folder: str) -> memoryview:
    """Maps the status file of a process. Unlike `mmap`, torch does not keep a descriptor for each mapped file."""
    os.close(os.open(path := f"{folder}/status", os.O_RDONLY))  # raises an OSError; torch would create a missing file
    return torch.from_file(path, shared=True, size=ctypes.sizeof(Status), dtype=torch.uint8).numpy().data


class StatusQuery:
    """Queries the status of processes on other hosts, and answers their queries in a thread.

    Attributes:
        answers: The last status of each peer.
        unanswered: The time of the query for each peer that has not answered yet.
    """

    def __init__(self, streams: Mapping[int, socket.socket], status: Status) -> None:
        self.answers: dict[int, Status] = {}
        self.unanswered: dict[int, float] = {}
        self._streams, self._status = dict(streams), status
        self._received = {peer: bytearray() for peer in streams}  # of peers that may still answer
        self._lock = threading.Lock()  # two threads cannot use the same TLS socket at the same time
        for stream in streams.values():
            stream.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="gpipe answers", daemon=True)
        if streams:
            self._thread.start()

    def ask(self) -> None:
        """Sends a query to all peers, without waiting for answers."""
        with self._lock:
            for peer in self._received:
                self.unanswered.setdefault(peer, time.monotonic())
                _send(self._streams[peer], QUESTION)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer, stream in self._streams.items():
                selector.register(stream, selectors.EVENT_READ, peer)
            while selector.get_map():
                for key, _ in selector.select():
                    with self._lock:
                        if not self._read(key.data):
                            selector.unregister(key.fileobj)
                            del self._received[key.data]
                            self.unanswered.pop(key.data, None)

    def _read(self, peer: int) -> bool:
        """Answers the queries of a peer, and stores answers of the peer. Returns whether the stream is still open."""
        stream, received = self._streams[peer], self._received[peer]
        try:
            while data := stream.recv(READ_BYTES):  # poll does not report data that a TLS socket has buffered
                received += data
                while received:
                    if received[:1] == QUESTION:
                        del received[:1]
                        _send(stream, self._answer())
                    elif received[:1] != SIGN:
                        return False  # gpipe does not send this
                    elif len(received) < ANSWER.size:
                        break
                    else:
                        self._keep(peer, *ANSWER.unpack_from(received)[1:])
                        del received[: ANSWER.size]
        except BLOCKED:
            return True
        except OSError:
            pass
        return False

    def _answer(self) -> bytes:
        status = Status.from_buffer_copy(self._status)
        age = time.monotonic() - status.since
        return ANSWER.pack(SIGN, status.run, status.at, status.layers, status.waits, age)

    def _keep(self, peer: int, run: int, at: int, layers: int, waits: bool, age: float) -> None:
        since = time.monotonic() - (age if math.isfinite(age) else 0.0)
        self.answers[peer] = Status(run, at, layers, waits, since)
        self.unanswered.pop(peer, None)

    def close(self) -> None:
        """Ends the streams and the thread."""
        for end in self._streams.values():
            with suppress(OSError):  # it is closed already
                socket.socket.shutdown(end, socket.SHUT_RDWR)  # ends the thread
        if self._streams:
            self._thread.join(1.0)
        self.drop()

    def drop(self) -> None:
        """Closes the descriptors of this process only: see `Connection.drop`."""
        for end in self._streams.values():
            end.close()


def _send(stream: socket.socket, data: bytes) -> None:
    with suppress(OSError, *BLOCKED):  # a peer that does not read gets no answer
        stream.send(data)


class Report(NamedTuple):
    """The report of a failure.

    Attributes:
        run: The number of the failed run, or 0 if the process closes its pipe outside a run.
        rank: The rank that failed.
        type_name: The type name of the exception. Empty if the rank was lost.
        message: The message.
        traceback: The traceback as text.
    """

    run: int
    rank: int
    type_name: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, run: int, rank: int, at: str = "") -> "Report":
        """Returns the report of an exception. `at` describes the action in which the exception was raised.

        If the exception is already a report about a different rank, the result is this report.
        """
        if isinstance(error, RemoteError) and error.received:
            return cls(run, error.rank, error.type_name, str(error), error.traceback)
        text = "".join(traceback.format_exception_only(error)).strip()  # with notes; works if str(error) raises
        if len(text) > LONGEST_TEXT:
            text = f"{text[: LONGEST_TEXT // 2]} [...] {text[-LONGEST_TEXT // 2 :]}"
        lines = traceback.format_exception(type(error), error, user_traceback(error))
        message = f"rank {rank} failed{at and f' {at}'}: {text}"
        return cls(run, rank, type(error).__name__, message, "".join(lines)[-LONGEST_TEXT:])

    @classmethod
    def read(cls, written: bytes) -> "Report":
        """Parses a report.

        Raises:
            ValueError: If the bytes are not a report.
        """
        match json.loads(written.decode("utf-8", "surrogatepass")):
            case [int(run), int(rank), str(type_name), str(message), str(text)]:
                return cls(run, rank, type_name, message, text)
        raise ValueError("not a report")

    def write(self) -> bytes:
        """Returns the report as JSON. The JSON is short enough to fit into a socket buffer."""
        return json.dumps(self, ensure_ascii=False).encode("utf-8", "surrogatepass")

    def error(self) -> RemoteError:
        """Returns the exception to raise for this report."""
        return received_error(self.message, self.rank, self.type_name, self.traceback)


class FailureDetector:
    """Detects which other processes of the pipe have failed, are lost, or delay the pipe.

    Attributes:
        run: The number of the current run.
        describe: A function that returns a description of the action in a status, for error messages.
        limit: The timeout of the process group, in seconds.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        shared: Mapping[int, StatusMemory],
        limit: float,
        query: StatusQuery,
    ) -> None:
        self.run = 0
        self.describe: Callable[[int, Status], str] = self.describe_idle
        self.limit = limit
        self._connections = connections
        self._reports: list[Report] = []
        self._ends: dict[int, str] = {}  # the first message about each peer that has ended
        self._shared = shared  # the status of each peer on this host
        self._query = query

    def check(self, needed: Collection[int]) -> list[int]:
        """Reads the control channels and returns the peers that have ended.

        Raises:
            RemoteError: If a process failed in this run, or a `needed` peer has ended.
        """
        for peer, connection in self._connections.items():
            with decoding("a report", peer):
                reports = [Report.read(message) for message in connection.control.read() if message]
            self._reports += reports
            self._ends.update((peer, report.message) for report in reports if not report.run)
        self._reports = [report for report in self._reports if report.run >= self.run]
        failed = [report for report in self._reports if report.run == self.run]
        gone = [peer for peer, connection in self._connections.items() if connection.control.gone]
        for peer in gone if not any(report.type_name for report in failed) else ():
            self._ends.setdefault(peer, f"rank {peer} is gone: {self.last_seen(peer, gone=True)}")
        if failed:
            raise failed[0].error()
        if missed := [peer for peer in gone if peer in needed]:
            silent = [peer for peer in self.silent(SILENT_SECONDS) if peer not in missed]
            lines = [self._ends[peer] for peer in missed] + self.all_last_seen(silent)
            raise received_error("\n".join(lines), missed[0])
        return gone

    def raise_lost(self, peer: int, closed: PeerClosed | None = None) -> NoReturn:
        """Raises an error with the reason why the stream from a peer ended.

        A report of a failed process has the highest priority, followed by an error of the local NCCL backend.
        Otherwise the peer counts as lost.
        """
        self.check(self._connections)
        channel = select.poll()
        channel.register(self._connections[peer].control.socket, select.POLLIN)
        channel.poll(REPORT_SECONDS * 1000)
        self.check(self._connections)
        if closed is not None and isinstance(closed.__cause__, RuntimeError):  # raised by the backend
            raise closed.__cause__
        raise received_error(f"rank {peer} is gone: {self.last_seen(peer, gone=True)}", peer)

    def raise_timeout(self, peer: int) -> NoReturn:
        """Raises a RemoteError about the timeout. The error names the ranks that delay the pipe, if known."""
        stuck = self.stuck(peer)
        why = f"no message for {self.limit:g} s, the timeout of the process group."
        raise received_error("\n".join([f"rank {peer}: {why}", *self.all_last_seen(stuck)]), stuck[0])

    def stuck(self, peer: int) -> list[int]:
        """Returns the ranks that delay the pipe. Returns only `peer` if these ranks are unknown."""
        active = {rank for rank, memory in self._known().items() if not Status.from_buffer_copy(memory).waits}
        return self.silent(SILENT_SECONDS) or sorted({*active, *self._query.unanswered.copy()}) or [peer]

    def _known(self) -> dict[int, StatusMemory]:
        return {**self._query.answers.copy(), **self._shared}

    def silent(self, seconds: float) -> list[int]:
        """Returns the peers whose hosts have not answered for longer than `seconds`. Thread-safe."""
        return [peer for peer, connection in self._connections.items() if connection.control.silent > seconds]

    def all_last_seen(self, peers: Collection[int]) -> list[str]:
        """Returns a line for each peer with the result of `last_seen`."""
        return [f"rank {peer}: {self.last_seen(peer)}" for peer in peers]

    def last_seen(self, peer: int, *, gone: bool = False) -> str:
        """Returns a description of the last known action of a peer. `gone` is True if the process has ended."""
        known, unanswered = self._known(), self._query.unanswered.copy()
        if peer not in self._shared:
            if (silent := self._connections[peer].control.silent) > SILENT_SECONDS:
                return f"it cannot be reached, because its host has not answered for {silent:.1f} s."
            if peer in unanswered and not gone:
                return STUCK.format(seconds=time.monotonic() - unanswered[peer])
            if gone or peer not in known:
                return f"it is on {self._connections[peer].host}. See the messages there."
        status = Status.from_buffer_copy(known[peer])
        seconds = time.monotonic() - status.since
        if status.run == self.run and status.at >= 0:
            return f"it was last seen {self.describe(peer, status)}\n    It began this {seconds:.1f} s earlier."
        where = f"outside any step, after {status.run} run{'s' * (status.run != 1)}"
        if gone:
            return f"it ended {where}."
        return f"it has been {where}, for {seconds:.1f} s, while this rank is in run {self.run}. {BUSY}"

    def gone(self) -> list[int]:
        """Returns the peers that have closed their connection. Thread-safe."""
        poll = select.poll()
        peers = {connection.control.socket.fileno(): peer for peer, connection in self._connections.items()}
        for handle in peers.keys() - {-1}:
            poll.register(handle, HANGS_UP)
        return sorted(peers[handle] for handle, _ in poll.poll(0))

    @staticmethod
    def describe_idle(peer: int, status: Status) -> str:
        """Describes a peer outside the actions of a step."""
        return "outside any step"
