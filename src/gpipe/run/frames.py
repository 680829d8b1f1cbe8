"""What goes over the connection of two processes: frames and news, and the slots of memory that they share."""

import mmap
import socket
import struct
from typing import NamedTuple

from gpipe.run.transport import Label

IN_SLOT = 64  # where in a slot the message begins
CHUNK = 2**16
FREE, FAILED = b"S", b"F"

HEADER = struct.Struct("<IiIBhIQQd")
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
        return HEADER.pack(
            self.run, route, micro_batch, gradient, self.slot, self.layout, self.size, self.capacity, self.sent
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> "Frame":
        """Reads what `to_bytes` wrote."""
        run, route, micro_batch, gradient, *rest = HEADER.unpack_from(data)
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
