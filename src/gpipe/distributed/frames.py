"""What goes over the connection of two processes: the frames of messages, and messages that must never wait for them.

What a peer sends is believed only as far as it can be: a hostile message costs no memory and no process.

Note "By hand". Of what frames messages already, gloo cannot be polled, wakes nobody when another fails, and takes two
to three times as long for 4 KiB (docs/log.md, 2026-11-20); multiprocessing's Connection waits in the middle of a
message, and unpickles; safetensors knows neither strides and alignment nor what is no tensor. Here nothing waits, a
peer's death is seen at once, and no more memory is taken than has come.
"""

import errno
import os
import resource
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from gpipe.errors import RemoteError, received
from gpipe.stages.messages import Label

SLOTS = 4
"""Messages that may be under way from one process to another and not yet taken."""
CHUNK_BYTES = 2**16
LARGEST_LAYOUT_BYTES = 2**26  # bytes: some hundred thousand tensors
LARGEST_CONTROL_BYTES = 2**20
HEADER = struct.Struct("<IiI?hIQQd")
_CONTROL = struct.Struct("<I")
_HANDLES = socket.CMSG_SPACE(64)  # bytes, room for the handles that come at once
MOST_HANDLES = 2**10  # those of new slots, not read yet: messages that small fit into the sockets' own memory
LIMITS = (errno.EMFILE, errno.ENFILE)
LAST_ANSWER = 56  # where in Linux's tcp_info stands how long ago the other end last answered, in ms


class Gone(ConnectionError):  # noqa: N818 it is a state, and caught where it arises
    """The process at the other end has ended, or cannot be reached any more."""


class Damaged(ValueError):  # noqa: N818 a state of the message
    """What came is nothing that gpipe sends."""


def damaged(peer: int, error: object) -> RemoteError:
    """What to raise where a process sent what cannot be."""
    return received(f"rank {peer} sent what gpipe never sends: {error}", peer)


@contextmanager
def reading(what: str, peer: int | None = None) -> Iterator[None]:
    """While something is read that may be damaged; if it is known whose it is, a RemoteError says so."""
    try:
        yield
    except (ValueError, TypeError, LookupError, RuntimeError, RecursionError, OverflowError, AttributeError) as error:
        said = f"{what} that gpipe does not send: {type(error).__name__}: {str(error)[:300]}"
        found = error if isinstance(error, Damaged) else Damaged(said)
        raise (found if peer is None else damaged(peer, found)) from error


@contextmanager
def explaining_limits() -> Iterator[None]:
    """Has an error that comes of too few file descriptors say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in LIMITS and not getattr(error, "__notes__", []):
            may = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            error.add_note(
                f"this process may have {may} files and sockets open, and connections to other processes need some: "
                f"allow more where it is started, as by `ulimit -n {max(4096, 4 * may)}`"
            )
        raise


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
        is_sound = -1 <= frame.slot < SLOTS and frame.layout <= LARGEST_LAYOUT_BYTES
        if not is_sound or max(frame.size, frame.capacity) >= 2**62:
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
            arrived, size = self.memory[self.start : self.end], self.end - self.start
            room = min(needed, max(CHUNK_BYTES, 2 * size))  # as much as comes, not as is said
            memory = self.memory if room <= len(self.memory) else bytearray(room)
            memory[:size] = arrived  # and no interrupt comes between this and the next line, which calls nothing
            self.memory, self.start, self.end = memory, 0, size
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
        if flags & socket.MSG_CTRUNC:  # the system leaves out, without a word, handles that would be too many
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if len(self.handles) > MOST_HANDLES:
            raise Damaged(f"{len(self.handles)} handles that no message names")
        return True


class ControlChannel:
    """The stream beside the messages: what waits to be sent, and what has come."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.gone = False
        self._arrived = bytearray()
        self._leaving = bytearray()

    @property
    def silent(self) -> float:
        """Seconds for which another host has answered nothing, if this system says so: it is asked every second."""
        with suppress(OSError, AttributeError):  # the connection is within this host, or the system is not Linux
            known = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ANSWER + 4)
            return float(struct.unpack_from("=I", known, LAST_ANSWER)[0]) / 1000
        return 0.0

    def send(self, message: bytes) -> None:
        """Sends something; who leaves much unread gets the rest with the next, and who is gone needs none."""
        self._leaving += _CONTROL.pack(len(message)) + message
        self._flush()

    def _flush(self) -> None:
        try:
            while self._leaving:
                del self._leaving[: self.socket.send(self._leaving)]
        except BlockingIOError:
            return
        except OSError:
            self._leaving.clear()

    def read(self) -> list[bytes]:
        """What has come meanwhile; notes when the other end is gone."""
        self._flush()
        try:
            while data := self.socket.recv(CHUNK_BYTES):
                self._arrived += data
            self.gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        found = []
        while len(self._arrived) >= _CONTROL.size:
            (size,) = _CONTROL.unpack_from(self._arrived)
            if size > LARGEST_CONTROL_BYTES:
                raise Damaged(f"a control message of {size} bytes")
            end = _CONTROL.size + size
            if len(self._arrived) < end:
                break
            found.append(bytes(self._arrived[_CONTROL.size : end]))
            del self._arrived[:end]
        return found
