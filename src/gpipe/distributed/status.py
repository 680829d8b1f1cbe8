"""What a process is at, for the others to see: those of its host in shared memory, those of other hosts by asking.

They ask by a stream of its own, which a thread answers. It does nothing else, so that it answers while layers run and
while data is made; not while its process is stopped, or something in it holds the interpreter's lock.
"""

import ctypes
import math
import mmap
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Self, TypeAlias

from gpipe.distributed.connection import BLOCKED

QUESTION, ANSWER = b"?", struct.Struct("<cIiI?d")  # an answer: a sign, and a status, with its age in seconds
SIGN = b"="
END = b"!"
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
    """The processes of other hosts, as they answer this one."""

    def __init__(self, streams: Mapping[int, socket.socket], status: Status) -> None:
        self.answers: dict[int, Status] = {}
        self._owed: dict[int, float] = {}  # since when an answer is
        self._streams, self._status = dict(streams), status
        self._answering = set(streams)
        self._come = {peer: bytearray() for peer in streams}
        self._bell, self._ring = socket.socketpair()
        for stream in streams.values():
            stream.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="gpipe answers", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Asks all, and waits for nobody."""
        now = time.monotonic()
        for peer in self._answering.copy():
            self._owed.setdefault(peer, now)
        self._ring.send(QUESTION)  # of the two ends of a stream the thread alone uses this one

    def owed(self) -> dict[int, float]:
        return self._owed.copy()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for peer, stream in self._streams.items():
                selector.register(stream, selectors.EVENT_READ, peer)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        if END in self._bell.recv(MOST_BYTES):
                            return
                        for stream in self._streams.values():
                            _send(stream, QUESTION)
                    elif not self._take(key.data):
                        selector.unregister(key.fileobj)
                        self._answering.discard(key.data)
                        self._owed.pop(key.data, None)

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
        self._owed.pop(peer, None)

    def close(self) -> None:
        with suppress(OSError):  # it is closed already
            self._ring.send(END)
            self._thread.join(1.0)
        self.drop()

    def drop(self) -> None:
        for end in (*self._streams.values(), self._bell, self._ring):
            end.close()


def _send(stream: socket.socket, data: bytes) -> None:
    with suppress(OSError, *BLOCKED):  # who reads nothing gets nothing
        stream.send(data)
