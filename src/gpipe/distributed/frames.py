"""What goes over the connection of two processes: frames and control messages, and slots of memory that they share.

What a peer sends is believed only as far as it can be: a hostile message costs no memory and no process.

Note "By hand". Of what frames messages already, gloo cannot be polled, wakes nobody when another fails, and takes two
to three times as long for 4 KiB (docs/log.md, 2026-11-20); multiprocessing's Connection waits in the middle of a
message, and unpickles; safetensors knows neither strides and alignment nor what is no tensor. Here nothing waits, a
peer's death is seen at once, and no more memory is taken than has come.
"""

import errno
import fcntl
import mmap
import os
import resource
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gpipe.errors import RemoteError, heard
from gpipe.stages.messages import Label


class Damaged(ValueError):  # noqa: N818 a state of the message
    """What came is nothing that gpipe sends."""


def damaged(peer: int, error: object) -> RemoteError:
    """What to raise where a process sent what cannot be."""
    return heard(f"rank {peer} sent what gpipe never sends: {error}", peer)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """While something is read that may be damaged."""
    try:
        yield
    except (ValueError, TypeError, LookupError, RuntimeError, RecursionError, OverflowError, AttributeError) as error:
        raise Damaged(f"{what} that gpipe does not send: {type(error).__name__}: {str(error)[:300]}") from error


LIMITS = (errno.EMFILE, errno.ENFILE)


def too_many_files() -> OSError:
    """What to raise where the system leaves out, without a word, handles that would be too many."""
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@contextmanager
def explaining_limits() -> Iterator[None]:
    """Has an error that comes of too few file descriptors say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in LIMITS and not getattr(error, "__notes__", []):
            may = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            error.add_note(
                f"this process may have {may} files and connections open, and links to other processes need some: "
                f"allow more where it is started, as by `ulimit -n {max(4096, 4 * may)}`"
            )
        raise


LARGEST_LAYOUT_BYTES = 2**26  # bytes: some hundred thousand tensors
LARGEST_CONTROL_BYTES = 2**20
SLOTS = 4
"""Messages that may be under way from one process to another and not yet taken."""
SLOT_HEADER_BYTES = 64  # where in a slot the message begins
CHUNK_BYTES = 2**16
FREE, FAILED = b"S", b"F"

HEADER = struct.Struct("<IiI?hIQQd")
_CONTROL = struct.Struct("<cI")
_HANDLES = socket.CMSG_SPACE(64)  # bytes, room for the handles that come at once
MOST_HANDLES = 2**10  # those of new slots, not read yet: messages that small fit into the sockets' own memory


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
        """Reads what `pack` wrote, or raises `Damaged`."""
        run, route, micro_batch, gradient, *rest = HEADER.unpack_from(memory, start)
        frame = cls(run, Label(route, micro_batch, gradient), *rest)
        if (
            not -1 <= frame.slot < SLOTS
            or frame.layout > LARGEST_LAYOUT_BYTES
            or max(frame.size, frame.capacity) >= 2**62
        ):
            raise Damaged(f"a header that gpipe does not send: {frame}")
        return frame

    def pack(self) -> bytes:
        """What stands in the stream ahead of the message."""
        return HEADER.pack(self.run, *self.label, *self[2:])


class Arrived:
    """What came by a stream and is not taken yet.

    The bytes lie in `memory` from `start` to `end`. The memory is kept; only for a message that needs more there is a
    larger one.
    """

    def __init__(self, stream: socket.socket) -> None:
        self.memory = bytearray(CHUNK_BYTES)
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
        if self.end == len(self.memory) or self.start + min(needed, CHUNK_BYTES) > len(self.memory):
            self._make_room(
                min(needed, max(CHUNK_BYTES, 2 * (self.end - self.start)))
            )  # as much as comes, not as is said
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
        if len(self.handles) > MOST_HANDLES:
            raise Damaged(f"{len(self.handles)} handles that no message names")
        return True

    def _make_room(self, needed: int) -> None:
        arrived, size = self.memory[self.start : self.end], self.end - self.start
        memory = self.memory if needed <= len(self.memory) else bytearray(needed)
        memory[:size] = arrived  # and no interrupt comes between this and the next line, which calls nothing
        self.memory, self.start, self.end = memory, 0, size


def make_memory(name: str, size: int) -> int:
    """A handle of memory without a name that can be shared; whoever has it cannot take it away from the others."""
    handle = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(handle, size)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(handle)
        raise
    return handle


def check_memory(handle: int, size: int) -> None:
    """Checks that a handle is memory of this size, which nobody can take away from under whoever reads it."""
    try:
        sealed = fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:  # no such memory at all
        sealed = 0
    if not sealed or os.fstat(handle).st_size != size:
        raise Damaged(f"a handle of memory that is not {size} bytes for good")


class Slot:
    """Shared memory for one message.

    Ahead of the message stand two bytes: whether it is taken, written by both ends, and whether the sender waits for
    any slot to be free, and is to get a message then. So most messages need no other.

    `unsent` is the handle that the other end must still be sent; also if an interrupt came in between.
    """

    def __init__(self, handle: int, capacity: int) -> None:
        self.capacity = capacity
        self.unsent: int | None = None
        self.memory = mmap.mmap(handle, SLOT_HEADER_BYTES + capacity)

    @property
    def taken(self) -> bool:
        """Whether a message is in it."""
        return bool(self.memory[0])

    def take(self) -> None:
        """Has it for a message."""
        self.memory[0] = 1

    def want(self) -> None:
        """Asks for a message when it is free."""
        self.memory[1] = 1

    def free(self) -> bool:
        """Lets it be used again; whether the sender waits for a message of it."""
        self.memory[0] = 0
        wanted = bool(self.memory[1])
        self.memory[1] = 0
        return wanted


class ControlChannel:
    """The stream beside the messages: what waits to be sent, and what has come."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._arrived = bytearray()
        self._leaving = bytearray()
        self.gone = False

    def send(self, kind: bytes, what: bytes) -> None:
        """Sends something; who leaves much unread gets the rest with the next, and who is gone needs none."""
        self._leaving += _CONTROL.pack(kind, len(what)) + what
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
        """What has come meanwhile; notes when the other end is gone."""
        self._flush()
        try:
            while data := self.connection.recv(CHUNK_BYTES):
                self._arrived += data
            self.gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        found = []
        while len(self._arrived) >= _CONTROL.size:
            kind, size = _CONTROL.unpack_from(self._arrived)
            if size > LARGEST_CONTROL_BYTES:
                raise Damaged(f"a control message of {size} bytes")
            if len(self._arrived) < _CONTROL.size + size:
                break
            found.append((kind, bytes(self._arrived[_CONTROL.size : _CONTROL.size + size])))
            del self._arrived[: _CONTROL.size + size]
        return found
