"""What goes over the connection of two processes: frames and news, and the slots of memory that they share."""

import mmap
import socket
import struct
from array import array
from collections import deque
from typing import NamedTuple

from gpipe.run.codec import Views
from gpipe.run.limits import too_many_files
from gpipe.run.transport import Label

IN_SLOT = 64  # where in a slot the message begins
CHUNK = 2**16
FREE, FAILED = b"S", b"F"

HEADER = struct.Struct("<IiI?hIQQd")
_NEWS = struct.Struct("<cI")
_HANDLES = socket.CMSG_SPACE(64)  # bytes, room for the handles that come at once


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

    @classmethod
    def read(cls, memory: bytes | bytearray, start: int = 0) -> "Frame":
        """Reads what `header` wrote."""
        run, route, micro_batch, gradient, *rest = HEADER.unpack_from(memory, start)
        return cls(run, Label(route, micro_batch, gradient), *rest)


def header(run: int, label: Label, slot: int, layout: int, size: int, capacity: int, sent: float) -> bytes:
    """What stands in the stream ahead of a message."""
    return HEADER.pack(run, *label, slot, layout, size, capacity, sent)


class Arrived:
    """What came by a stream and is not taken yet.

    The bytes lie in `memory` from `start` to `end`. The memory is kept, and with it the `views` of what came through
    it; only for a message that needs more there is a larger one.
    """

    def __init__(self, stream: socket.socket) -> None:
        self.memory = bytearray(CHUNK)
        self.views: Views = {}
        self.start = self.end = 0
        self.handles: deque[int] = deque()
        self._stream = stream
        self._length = 0  # of the first message

    def first(self) -> Frame | None:
        """The header of the first message, once all of it is here."""
        needed = HEADER.size
        while True:
            have = self.end - self.start
            if have >= HEADER.size:
                frame = Frame.read(self.memory, self.start)
                needed = HEADER.size + frame.layout + (frame.size if frame.slot < 0 else 0)
                if have >= needed:
                    self._length = needed
                    return frame
            if not self._read(needed):
                return None

    def drop(self) -> None:
        """Lets go of the first message."""
        self.start += self._length
        if self.start == self.end:
            self.start = self.end = 0

    def _read(self, needed: int) -> bool:
        """Reads what the stream has, as far as there is room, for a first message of so many bytes."""
        if self.start + needed > len(self.memory):
            self._make_room(needed)
        try:
            count, ancillary, flags, _ = self._stream.recvmsg_into([memoryview(self.memory)[self.end :]], _HANDLES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise Gone(str(error)) from error
        if not count:
            raise Gone("its process has ended")
        self.end += count
        for _, _, data in ancillary:
            self.handles.extend(array("i", data))
        if flags & socket.MSG_CTRUNC:
            raise too_many_files()
        return True

    def _make_room(self, needed: int) -> None:
        arrived, size = self.memory[self.start : self.end], self.end - self.start
        memory, views = (self.memory, self.views) if needed <= len(self.memory) else (bytearray(needed), {})
        memory[:size] = arrived  # and no interrupt comes between this and the next line, which calls nothing
        self.memory, self.views, self.start, self.end = memory, views, 0, size


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
