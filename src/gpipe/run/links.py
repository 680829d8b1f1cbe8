"""The connection to one other process: a stream of messages each way, and beside it one for news.

A message is a frame: a header of fixed layout, the layout of its tensors, and their bytes (codec.py). What is small
goes through the stream itself. Within a host what is large goes through one of a few slots of shared memory, and the
stream says which: memory without a name, that is gone with the last process that has it. Between hosts two threads
keep a few messages under way.

News are what must never wait behind messages: that a slot is free again, that a rank failed, that a process is gone.
"""

import json
import mmap
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import torch

from gpipe.run.codec import Buffer, Encoded
from gpipe.run.transport import Label

INLINE = 2**15
"""Bytes up to which tensors go through the stream: there two processes take about 25 us."""
SLOTS = 4
"""Messages that may be under way from one process to another and not yet taken."""
IN_SLOT = 64  # where in a slot the message begins
CHUNK = 2**16
LAST_ANSWER = 56  # where in Linux's tcp_info stands how long ago the other end last answered, in ms
FREE, FAILED = b"S", b"F"

Piece: TypeAlias = bytes | bytearray | memoryview
_HEADER = struct.Struct("<IiIBhIQQd")
_NEWS = struct.Struct("<cI")


class Gone(ConnectionError):  # noqa: N818 it is a state, and caught where it arises
    """The process at the other end has ended, or cannot be reached any more."""


class Frame(NamedTuple):
    """The header of a message.

    `run` counts the runs of a pipe, so that what a failed one left on its way is known. `slot` is -1 for what is in
    the stream; `capacity` is that of a slot which is new. `sent` is when, by the sender's clock.
    """

    run: int
    label: Label
    slot: int
    layout: int
    size: int
    capacity: int
    sent: float

    def to_bytes(self) -> bytes:
        """What stands in the stream."""
        route, micro_batch, gradient = self.label
        return _HEADER.pack(
            self.run, route, micro_batch, gradient, self.slot, self.layout, self.size, self.capacity, self.sent
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> "Frame":
        """Reads what `to_bytes` wrote."""
        run, route, micro_batch, gradient, *rest = _HEADER.unpack_from(data)
        return cls(run, Label(route, micro_batch, bool(gradient)), *rest)


class Slot:
    """Shared memory for one message.

    Ahead of the message stand two bytes: whether it is taken, written by both ends, and whether the sender waits for
    any slot to be free, so that it must be told. Then nothing has to be said of most messages.

    `untold` is the handle that the other end must still be sent; also if an interrupt came in between.
    """

    def __init__(self, handle: int, capacity: int) -> None:
        self.capacity = capacity
        self.untold: int | None = None
        self.memory = mmap.mmap(handle, IN_SLOT + capacity)

    @property
    def taken(self) -> bool:
        """Whether a message is in it."""
        return bool(self.memory[0])

    def take(self) -> None:
        """Has it for a message."""
        self.memory[0] = 1

    def want(self) -> None:
        """Asks to be told when it is free."""
        self.memory[1] = 1

    def free(self) -> bool:
        """Lets it be used again; whether the sender must be told."""
        self.memory[0] = 0
        wanted = bool(self.memory[1])
        self.memory[1] = 0
        return wanted


class News:
    """The stream beside the messages: what has been told, and what comes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._arrived = bytearray()
        self._leaving = bytearray()
        self.gone = False

    def tell(self, kind: bytes, what: bytes) -> None:
        """Tells something; who leaves many news unread gets the rest with the next, and who is gone needs none."""
        self._leaving += _NEWS.pack(kind, len(what)) + what
        self._flush()

    def _flush(self) -> None:
        try:
            while self._leaving:
                del self._leaving[: self.connection.send(self._leaving)]
        except BlockingIOError:
            return
        except OSError:
            self._leaving.clear()

    def read(self) -> list[tuple[bytes, bytes]]:
        """What has been told meanwhile; notes when the other end is gone."""
        self._flush()
        try:
            while data := self.connection.recv(CHUNK):
                self._arrived += data
            self.gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        found = []
        while len(self._arrived) >= _NEWS.size:
            kind, size = _NEWS.unpack_from(self._arrived)
            if len(self._arrived) < _NEWS.size + size:
                break
            found.append((kind, bytes(self._arrived[_NEWS.size : _NEWS.size + size])))
            del self._arrived[: _NEWS.size + size]
        return found


class Link:
    """The connection to a process of this host.

    Nothing here waits: `poll` what `fileno` gives, for reading before `head`, for writing while `flush` is False.
    """

    def __init__(self, stream: socket.socket, news: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self.news = News(news)
        self.reports: list[Mapping[str, Any]] = []
        self._arrived = bytearray()
        self._head: Frame | None = None
        self._handles: deque[int] = deque()
        self._leaving = b""
        self._handle: int | None = None
        self._own: list[Slot] = []
        self._theirs: dict[int, Slot] = {}

    def fileno(self) -> int:
        """What to poll."""
        return self._stream.fileno()

    def listen(self) -> None:
        """Reads the news."""
        for kind, what in self.news.read():
            if kind == FAILED:
                self.reports.append(json.loads(what))

    def events(self, *, reading: bool, writing: bool) -> int:
        """What to poll for: news of free slots come by `news`."""
        return (select.POLLIN if reading else 0) | (select.POLLOUT if writing and self._leaving else 0)

    def has_room(self, size: int) -> bool:
        """Whether a message of so many bytes can be put on its way now."""
        if self._leaving:
            return False
        return size <= INLINE or len(self._own) < SLOTS or not all(slot.taken for slot in self._own)

    def want_room(self) -> None:
        """Asks to be told when there may be room again."""
        for slot in self._own:
            slot.want()

    def put(self, run: int, label: Label, message: Encoded, sent: float) -> None:
        """Puts a message on its way, for which there must be room; `flush` sends what the stream does not take."""
        layout, size = message.layout, message.size
        if size <= INLINE or not hasattr(os, "memfd_create"):
            head = Frame(run, label, -1, len(layout), size, 0, sent).to_bytes()
            self._send([head, layout, *message.pieces()], len(head) + len(layout) + size)
            return
        at = self._slot_of(size)
        slot = self._own[at]
        message.write(torch.frombuffer(slot.memory, dtype=torch.uint8, offset=IN_SLOT))
        slot.take()
        handle, slot.untold = slot.untold, None
        capacity = slot.capacity if handle is not None else 0
        head = Frame(run, label, at, len(layout), size, capacity, sent).to_bytes()
        self._send([head, layout], len(head) + len(layout), handle)

    def _slot_of(self, size: int) -> int:
        """A free slot that is large enough; made, if there is none."""
        free = [at for at, slot in enumerate(self._own) if not slot.taken]
        for at in free:
            if self._own[at].capacity >= size:
                return at
        capacity = 1 << (size - 1).bit_length()
        handle = os.memfd_create("gpipe", os.MFD_CLOEXEC)
        os.ftruncate(handle, IN_SLOT + capacity)
        slot = Slot(handle, capacity)
        slot.untold = handle
        if len(self._own) < SLOTS:
            self._own.append(slot)
            return len(self._own) - 1
        old, self._own[free[0]] = self._own[free[0]], slot  # instead of one that is too small, at both ends
        if old.untold is not None:
            os.close(old.untold)
        return free[0]

    def _send(self, pieces: Sequence[Piece], size: int, handle: int | None = None) -> None:
        """Gives the stream what it takes, a handle with the first byte; the rest is left for `flush`."""
        try:
            handles = [] if handle is None else [handle]
            sent = socket.send_fds(self._stream, pieces, handles) if handles else self._stream.sendmsg(pieces)
        except BlockingIOError:
            self._leaving, self._handle = b"".join(pieces), handle
            return
        except OSError as error:
            raise Gone(str(error)) from error
        if handle is not None:
            os.close(handle)
        self._leaving = b"" if sent == size else b"".join(pieces)[sent:]
        self._handle = None

    def flush(self) -> bool:
        """Sends what is left of a message; whether nothing is."""
        if self._leaving:
            self._send([self._leaving], len(self._leaving), self._handle)
        return not self._leaving

    def has_left(self) -> bool:
        """Whether all messages are on their way, and would arrive also if this process ended now."""
        return self.flush()

    @property
    def silent(self) -> float:
        """Seconds for which the other host has answered nothing."""
        return 0.0

    def head(self) -> Frame | None:
        """The next message's header, once the message is here; None before."""
        if self._head is None and not self._is_whole():
            self._read()
            self._is_whole()
        return self._head

    def _is_whole(self) -> bool:
        have = len(self._arrived)
        if have < _HEADER.size:
            return False
        frame = Frame.from_bytes(self._arrived)
        if have < _HEADER.size + frame.layout + (frame.size if frame.slot < 0 else 0):
            return False
        if frame.capacity:
            handle = self._handles.popleft()
            self._theirs[frame.slot] = Slot(handle, frame.capacity)
            os.close(handle)
        self._head = frame
        return True

    def _read(self) -> None:
        try:
            data, handles, _, _ = socket.recv_fds(self._stream, CHUNK, SLOTS)
        except BlockingIOError:
            return
        except OSError as error:
            raise Gone(str(error)) from error
        if not data:
            raise Gone("its process has ended")
        self._handles.extend(handles)
        self._arrived += data

    def message(self, frame: Frame) -> tuple[bytes, Buffer, int]:
        """The layout of the next message, where its tensors' bytes are, and from where on; until `done`."""
        start = _HEADER.size + frame.layout
        layout = bytes(self._arrived[_HEADER.size : start])
        if frame.slot < 0:
            return layout, self._arrived, start
        return layout, self._theirs[frame.slot].memory, IN_SLOT

    def done(self, frame: Frame) -> None:
        """Goes on to the next message, and lets the other end use the memory of this one again."""
        self._head = None
        del self._arrived[: _HEADER.size + frame.layout + (frame.size if frame.slot < 0 else 0)]
        if frame.slot >= 0 and self._theirs[frame.slot].free():
            self.news.tell(FREE, b"")

    def report(self, what: Mapping[str, Any]) -> None:
        """Tells the other end that a rank failed."""
        self.news.tell(FAILED, json.dumps(what, ensure_ascii=False).encode("utf-8", "surrogatepass"))

    def close(self) -> None:
        """Ends the connection."""
        self.drop()

    def drop(self) -> None:
        """Lets go of a connection that another process goes on with, the one that this one was forked from."""
        self._stream.close()
        self.news.connection.close()
        untold = [self._handle, *(slot.untold for slot in self._own)]
        for handle in (*self._handles, *untold):
            if handle is not None:
                os.close(handle)
        self._handle = None
        for held in (self._handles, self._own, self._theirs):
            held.clear()


class RemoteLink(Link):
    """The connection to a process of another host: threads read and write while the rank computes."""

    def __init__(self, stream: socket.socket, news: socket.socket) -> None:
        super().__init__(stream, news)
        stream.setblocking(True)
        self._bell, self._ring = socket.socketpair()  # a byte whenever a thread has something new
        self._bell.setblocking(False)
        self._inbox: deque[tuple[Frame, bytes, bytearray]] = deque()
        self._outbox: SimpleQueue[memoryview | None] = SimpleQueue()
        self._unsent = 0
        self._room = threading.Semaphore(SLOTS)
        self._broken: str | None = None
        self._threads = [
            threading.Thread(target=work, name=f"gpipe {work.__name__}", daemon=True)
            for work in (self._keep_reading, self._keep_writing)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """What to poll."""
        return self._bell.fileno()

    def events(self, *, reading: bool, writing: bool) -> int:
        """What to poll for."""
        return select.POLLIN if reading or writing else 0

    def has_room(self, size: int) -> bool:
        """Whether a message of so many bytes can be put on its way now."""
        self._hear()
        return self._unsent < SLOTS

    def want_room(self) -> None:
        """The thread that writes always tells."""

    def put(self, run: int, label: Label, message: Encoded, sent: float) -> None:
        """Puts a message on its way, for which there must be room."""
        head = Frame(run, label, -1, len(message.layout), message.size, 0, 0.0).to_bytes()
        data = memoryview(b"".join([head, message.layout, *message.pieces()]))
        if not self._unsent:  # nobody else writes, and what the network takes at once needs no thread
            try:
                data = data[self._stream.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError as error:
                raise Gone(str(error)) from error
        if data.nbytes:
            self._unsent += 1
            self._outbox.put(data)

    def flush(self) -> bool:
        """Everything leaves by itself."""
        return True

    def has_left(self) -> bool:
        """Whether all messages are on their way, and would arrive also if this process ended now."""
        self._hear()
        return not self._unsent

    @property
    def silent(self) -> float:
        """Seconds for which the other host has answered nothing, if this system says so: it is asked every second."""
        if not hasattr(socket, "TCP_INFO"):
            return 0.0
        try:
            known = self.news.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ANSWER + 4)
        except OSError:
            return 0.0
        return float(struct.unpack_from("=I", known, LAST_ANSWER)[0]) / 1000

    def head(self) -> Frame | None:
        """The next message's header, once the message is here; None before."""
        self._hear()
        return self._inbox[0][0] if self._inbox else None

    def _hear(self) -> None:
        if self._broken is not None and not self._inbox:
            raise Gone(self._broken)
        try:
            rung = self._bell.recv(CHUNK)
        except BlockingIOError:
            return
        self._unsent -= rung.count(b"w")

    def message(self, frame: Frame) -> tuple[bytes, Buffer, int]:
        """The layout of the next message, where its tensors' bytes are, and from where on; until `done`."""
        _, layout, memory = self._inbox[0]
        return layout, memory, 0

    def done(self, frame: Frame) -> None:
        """Goes on to the next message."""
        self._inbox.popleft()
        self._room.release()

    def _keep_reading(self) -> None:
        try:
            while True:
                frame = Frame.from_bytes(_receive(self._stream, _HEADER.size))
                layout = bytes(_receive(self._stream, frame.layout))
                self._inbox.append((frame, layout, _receive(self._stream, frame.size)))
                self._ring.send(b"r")
                self._room.acquire()
        except OSError as error:
            self._break(error)

    def _keep_writing(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
                self._stream.sendall(data)
                del data
                self._ring.send(b"w")
        except OSError as error:
            self._break(error)

    def _break(self, error: OSError) -> None:
        self._broken = str(error)
        with suppress(OSError):
            self._ring.send(b"!")

    def close(self) -> None:
        """Ends the connection and the threads."""
        self._outbox.put(None)
        for end in (self._stream, self.news.connection):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._stream.close()
        self._room.release()
        for thread in self._threads:
            thread.join(1.0)
        self.drop()

    def drop(self) -> None:
        """Lets go of a connection that another process goes on with, the one that this one was forked from."""
        super().drop()
        self._bell.close()
        self._ring.close()


def _receive(stream: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view.nbytes:
        count = stream.recv_into(view)
        if not count:
            raise Gone("the connection was closed")
        view = view[count:]
    return data
