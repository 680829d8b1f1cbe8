"""Implements the connection to one peer process: a stream of messages in each direction, and a control channel.

Each message has three parts: a fixed-size header (`Frame`), the layout of the tensors, and the bytes of the tensors
(see codec.py).

- Small messages go through the stream.
- Within a host, large messages go through one of a few slots of shared memory, and the stream contains the index of
  the slot. The memory is anonymous, so the kernel frees it after the last process that maps it has ended.
- Between hosts, two threads keep a few messages in flight.

The control channel is for messages that must not wait for tensors: failures, the end of a process, and empty
messages that report a free slot.

gpipe validates all input from a peer. A malicious message can neither exhaust the memory nor crash this process.

Note:
    Existing libraries lack features that gpipe needs:

    - gloo cannot be polled, and does not wake a receiver when a peer fails. A message of 4 KiB takes two to three
      times as long with gloo (dev/log.md, 2026-11-20).
    - `multiprocessing.Connection` blocks in the middle of a message, and unpickles received data.
    - safetensors does not store strides, alignment or values that are not tensors.
"""

import errno
import fcntl
import mmap
import os
import select
import socket
import ssl
import struct
import threading
import time
from array import array
from collections import deque
from contextlib import suppress
from io import BufferedReader
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.distributed import codec
from gpipe.distributed.codec import CorruptMessage, Encoded, PeerClosed
from gpipe.distributed.tls import is_tampering
from gpipe.stages.messages import Label, Message

BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
ALTERED = "TLS rejected the received bytes as altered"
RECORD_BYTES = 2**14  # size of a TLS record
SLOTS = 4  # maximum number of messages in flight from one process to another
CHUNK_BYTES = 2**16
LARGEST_LAYOUT_BYTES = 2**26  # a few hundred thousand tensors; allocated as soon as a header announces it
LARGEST_CONTROL_BYTES = 2**20
HEADER = struct.Struct("<IiI?hIQQd")
_CONTROL = struct.Struct("<I")
_ANCILLARY_BYTES = socket.CMSG_SPACE(64)  # room for the file descriptors that one recvmsg call returns
MOST_HANDLES = 2**10  # file descriptors of unread messages: very small messages fit into the socket buffer
LAST_ANSWER = 56  # offset in Linux's struct tcp_info of the ms since the peer's last acknowledgment
INLINE_BYTES = 2**15  # larger messages use slots; up to this size the stream takes about 25 us between two processes
SLOT_HEADER_BYTES = 64  # offset of the message in a slot
FAST_BYTES_PER_SECOND = 2**32  # a sender waits for a network of this speed; for a slower one, it copies the message


class Frame(NamedTuple):
    """The header of a message.

    Attributes:
        run: The number of the sender's run. With this number, the receiver recognizes messages of a failed run.
        label: The label of the message.
        slot: The index of the slot with the tensors, or -1 if the tensors follow in the stream.
        layout: The number of bytes of the layout.
        size: The number of bytes of the tensors.
        capacity: The size of a slot that is sent for the first time, otherwise 0.
        sent: The time at which the message was sent, in seconds of the sender's clock.
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
        run, route, micro_batch, gradient, *rest = HEADER.unpack_from(memory, start)
        frame = cls(run, Label(route, micro_batch, gradient), *rest)
        is_sound = -1 <= frame.slot < SLOTS and frame.layout <= LARGEST_LAYOUT_BYTES
        if not is_sound or max(frame.size, frame.capacity) >= 2**62:
            raise CorruptMessage(f"a header that gpipe does not send: {frame}")
        return frame

    def pack(self) -> bytes:
        return HEADER.pack(self.run, *self.label, *self[2:])


class ReceiveBuffer:
    """A buffer for the received bytes of a stream. `memory[start:end]` are the bytes that are not consumed yet.

    The buffer reuses its memory. The memory grows only for a message that does not fit.
    """

    def __init__(self, stream: socket.socket) -> None:
        self.memory = bytearray(CHUNK_BYTES)
        self.start = self.end = 0
        self.handles: deque[int] = deque()
        self._stream = stream
        self._length = 0  # of the first message

    def first(self) -> Frame | None:
        """Returns the header of the first message, or None if the message is not complete yet."""
        needed = HEADER.size
        while True:
            available = self.end - self.start
            if available >= HEADER.size:
                frame = Frame.read(self.memory, self.start)
                needed = HEADER.size + frame.layout + (frame.size if frame.slot < 0 else 0)
                if available >= needed:
                    self._length = needed
                    return frame
            if not self._read(needed):
                return None

    def drop(self) -> None:
        self.start += self._length
        if self.start == self.end:
            self.start = self.end = 0

    def _read(self, needed: int) -> bool:
        """Reads available bytes of the first message, which has `needed` bytes. Returns whether it read any bytes."""
        if self.end == len(self.memory) or self.start + min(needed, CHUNK_BYTES) > len(self.memory):
            unread, size = self.memory[self.start : self.end], self.end - self.start
            capacity = min(needed, max(CHUNK_BYTES, 2 * size))  # grows with received bytes, not announced ones
            memory = self.memory if capacity <= len(self.memory) else bytearray(capacity)
            memory[:size] = unread  # no interrupt can occur between this and the next line, which calls nothing
            self.memory, self.start, self.end = memory, 0, size
        try:
            free = memoryview(self.memory)[self.end :]
            count, ancillary, flags, _ = self._stream.recvmsg_into([free], _ANCILLARY_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerClosed(str(error)) from error
        if not count:
            raise PeerClosed("its process has ended")
        self.end += count
        for _, _, data in ancillary:
            self.handles.extend(array("i", data))
        if flags & socket.MSG_CTRUNC:  # the kernel silently drops file descriptors beyond the limit
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if len(self.handles) > MOST_HANDLES:
            raise CorruptMessage(f"{len(self.handles)} file descriptors that no message names")
        return True


class ControlChannel:
    """The control channel of a connection, with its buffers of unsent and unparsed bytes.

    Attributes:
        gone: Whether the peer has closed the channel.
        unreachable: Whether the channel ended because the peer's host could not be reached.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.gone = self.unreachable = False
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def silent(self) -> float:
        """The number of seconds since the peer's host last answered a keep-alive probe, which is sent every second.

        Returns 0 if the peer is on the same host, or if the system does not report this time.
        """
        with suppress(OSError, AttributeError):  # the connection is within this host, or the system is not Linux
            known = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ANSWER + 4)
            return float(struct.unpack_from("=I", known, LAST_ANSWER)[0]) / 1000
        return 0.0

    def send(self, message: bytes) -> None:
        """Sends a message without blocking. If the peer reads too slowly, the next call sends the remaining bytes."""
        self._unsent += _CONTROL.pack(len(message)) + message
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BLOCKED:
            return
        except OSError:
            self._unsent.clear()

    def read(self) -> list[bytes]:
        """Returns the complete messages received since the last call. Sets `gone` if the peer closed the channel."""
        self._flush()
        try:
            while data := self.socket.recv(CHUNK_BYTES):
                self._received += data
            self.gone = True
        except BLOCKED:
            pass
        except OSError as error:
            self.gone, self.unreachable = True, error.errno in UNREACHABLE
            if is_tampering(error):
                raise CorruptMessage(f"{ALTERED}: {error}") from error
        messages = []
        while len(self._received) >= _CONTROL.size:
            (size,) = _CONTROL.unpack_from(self._received)
            if size > LARGEST_CONTROL_BYTES:
                raise CorruptMessage(f"a control message of {size} bytes")
            end = _CONTROL.size + size
            if len(self._received) < end:
                break
            messages.append(bytes(self._received[_CONTROL.size : end]))
            del self._received[:end]
        return messages


class Slot:
    """Shared memory for one message.

    Two flag bytes precede the message:

    - The first flag is 1 while the slot holds an unread message. The sender sets the flag, and the receiver clears
    it.
    - The second flag is 1 if the sender waits for a free slot. Only then does the receiver send a control message
    when
      it frees the slot. Most messages therefore need no control message.

    Attributes:
        capacity: The number of bytes for a message.
        unsent: The file descriptor that the peer has not received yet, or None.
        memory: The mapped memory.
    """

    def __init__(self, handle: int, capacity: int) -> None:
        self.capacity = capacity
        self.unsent: int | None = None
        self.memory = mmap.mmap(handle, SLOT_HEADER_BYTES + capacity)

    @classmethod
    def make(cls, capacity: int) -> "Slot":
        """Creates a slot in anonymous memory. The memory is sealed, so that no process can resize it."""
        handle = os.memfd_create("gpipe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(handle, SLOT_HEADER_BYTES + capacity)
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            slot = cls(handle, capacity)
        except BaseException:
            os.close(handle)
            raise
        slot.unsent = handle
        return slot

    @classmethod
    def from_peer(cls, handle: int, capacity: int) -> "Slot":
        """Maps a slot of the peer. Rejects unsealed memory, because reading shrunk memory would kill this process."""
        sealed = 0
        try:
            with suppress(OSError):  # the descriptor is not a memfd
                sealed = fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(handle).st_size != SLOT_HEADER_BYTES + capacity:
                raise CorruptMessage(f"a descriptor without {SLOT_HEADER_BYTES + capacity} bytes of sealed memory")
            return cls(handle, capacity)
        finally:
            os.close(handle)

    @property
    def taken(self) -> bool:
        return bool(self.memory[0])


class Connection:
    """The connection to a process on the same host.

    No method blocks. Poll `fileno()` for reading before you call `head`, and for writing while `flush` returns False.
    """

    host = "a different host"  # replaced by the name of the peer's host

    def __init__(self, stream: socket.socket, control: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self.control = ControlChannel(control)
        self._buffer = ReceiveBuffer(stream)
        self._head: Frame | None = None
        self._unsent_bytes = b""
        self._unsent_slot: Slot | None = None  # its file descriptor is sent with these bytes
        self._slots: list[Slot] = []
        self._peer_slots: dict[int, Slot] = {}

    def fileno(self) -> int:
        return self._stream.fileno()

    def events(self, *, reading: bool, writing: bool) -> int:
        """Returns the events of the stream to poll for. The channel `control` reports free slots."""
        return (select.POLLIN if reading else 0) | (select.POLLOUT if writing and self._unsent_bytes else 0)

    def has_room(self, size: int) -> bool:
        """Returns whether a message of `size` bytes can be sent now."""
        if self._unsent_bytes and not self.flush():
            return False
        return size <= INLINE_BYTES or len(self._slots) < SLOTS or not all(slot.taken for slot in self._slots)

    def want_room(self) -> None:
        """Requests that the peer sends a control message when it frees a slot."""
        for slot in self._slots:
            slot.memory[1] = 1

    def put(self, run: int, label: Label, message: Encoded, sent: float) -> bool:
        """Sends a message. Call only if `has_room`. If it returns False, call `flush` until `flush` returns True."""
        layout, size = message.layout, message.size
        if size <= INLINE_BYTES or not hasattr(os, "memfd_create"):
            return self._send(Frame(run, label, -1, len(layout), size, 0, sent).pack(), layout, *message.pieces())
        index = self._free_slot(size)
        slot = self._slots[index]
        message.write(torch.frombuffer(slot.memory, dtype=torch.uint8, offset=SLOT_HEADER_BYTES))
        slot.memory[0] = 1
        capacity = 0 if slot.unsent is None else slot.capacity
        return self._send(Frame(run, label, index, len(layout), size, capacity, sent).pack(), layout, slot=slot)

    def _free_slot(self, size: int) -> int:
        """Returns the index of a free slot of at least `size` bytes. Creates a new slot if necessary."""
        free = [index for index, slot in enumerate(self._slots) if not slot.taken]
        for index in free:
            if self._slots[index].capacity >= size:
                return index
        slot = Slot.make(1 << (size - 1).bit_length())
        if len(self._slots) < SLOTS:
            self._slots.append(slot)
            return len(self._slots) - 1
        old, self._slots[free[0]] = self._slots[free[0]], slot
        if old.unsent is not None:
            os.close(old.unsent)
        return free[0]

    def _send(self, *pieces: bytes | bytearray | memoryview, slot: Slot | None = None) -> bool:
        """Writes the bytes that the stream accepts, with the descriptor of a new slot. Keeps the rest for `flush`."""
        try:
            if slot is None or slot.unsent is None:
                sent = self._stream.sendmsg(pieces)
            else:
                sent = socket.send_fds(self._stream, pieces, [slot.unsent])
                os.close(slot.unsent)
                slot.unsent = None
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise PeerClosed(str(error)) from error
        unsent = sum(memoryview(piece).nbytes for piece in pieces) - sent
        self._unsent_bytes, self._unsent_slot = (b"".join(pieces)[-unsent:], slot) if unsent else (b"", None)
        return not unsent

    def flush(self) -> bool:
        """Sends unsent bytes. Returns True if all messages will arrive even if this process ends now."""
        return not self._unsent_bytes or self._send(self._unsent_bytes, slot=self._unsent_slot)

    def head(self) -> Frame | None:
        """Returns the header of the next message, or None if that message is not complete yet."""
        if self._head is None and (frame := self._buffer.first()) is not None:
            if frame.capacity:
                if not self._buffer.handles:
                    raise CorruptMessage("a new slot without a file descriptor")
                self._peer_slots[frame.slot] = Slot.from_peer(self._buffer.handles.popleft(), frame.capacity)
            if frame.slot >= 0:
                slot = self._peer_slots.get(frame.slot)
                if slot is None or frame.size > slot.capacity:
                    raise CorruptMessage(f"a message of {frame.size} bytes in a slot that is too small")
            self._head = frame
        return self._head

    def message(self, frame: Frame) -> Message:
        """Decodes the next message. The message remains the next message until a call of `done`."""
        memory = self._buffer.memory
        start = self._buffer.start + HEADER.size
        end = start + frame.layout
        layout = bytes(memory[start:end])
        if frame.slot < 0:
            return codec.decode(layout, memory, end, size=frame.size)
        return codec.decode(layout, self._peer_slots[frame.slot].memory, SLOT_HEADER_BYTES, size=frame.size)

    def done(self, frame: Frame) -> None:
        """Advances to the next message, and frees the slot of the current message."""
        self._head = None
        self._buffer.drop()
        if frame.slot >= 0:
            memory = self._peer_slots[frame.slot].memory
            memory[0] = 0
            if memory[1]:
                memory[1] = 0
                self.control.send(b"")

    def drop(self) -> None:
        """Closes the descriptors in this process. After a fork, the parent can continue to use the connection."""
        self._stream.close()
        self.control.socket.close()
        for handle in (*self._buffer.handles, *(slot.unsent for slot in self._slots)):
            if handle is not None:
                os.close(handle)
        for container in (self._buffer.handles, self._slots, self._peer_slots):
            container.clear()

    close = drop  # there is no thread to end

    def abandon(self) -> None:
        """Ends the connection without waiting. The descriptors are closed with this object."""
        for end in (self._stream, self.control.socket):
            with suppress(OSError):  # it is closed already
                # SSLSocket.shutdown would make a sending thread continue without encryption.
                socket.socket.shutdown(end, socket.SHUT_RDWR)


class TcpConnection(Connection):
    """The connection to a process on a different host. Two threads read and write while the rank computes.

    With TLS, the two threads use separate streams, because threads cannot use the same TLS socket at the same time.
    """

    def __init__(self, stream: socket.socket, control: socket.socket, outgoing: socket.socket | None = None) -> None:
        super().__init__(stream, control)
        self._outgoing = outgoing or stream
        for end in (stream, self._outgoing):
            end.setblocking(True)
        # Small payloads go through the read-ahead buffer; large ones are read directly into their destination.
        self._ahead = BufferedReader(stream.makefile("rb", 0), CHUNK_BYTES)
        self._writable = select.poll()
        self._writable.register(self._outgoing, select.POLLOUT)
        # A thread writes to `_notify` whenever it has received or sent a message; the rank polls `_notified`.
        self._notified, self._notify = socket.socketpair()
        self._notified.setblocking(False)
        self._inbox: deque[tuple[Frame, bytes, list[Tensor]]] = deque()
        self._outbox: SimpleQueue[memoryview | None] = SimpleQueue()
        self._unsent = 0
        self._room = threading.Semaphore(SLOTS)
        self._broken: Exception | None = None
        self._threads = [
            threading.Thread(target=work, name=f"gpipe {work.__name__}", daemon=True)
            for work in (self._keep_reading, self._keep_writing)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        return self._notified.fileno()

    def events(self, *, reading: bool, writing: bool) -> int:
        return select.POLLIN if reading or writing else 0

    def has_room(self, size: int) -> bool:
        self._read_notifications()
        return self._unsent < SLOTS

    def put(self, run: int, label: Label, message: Encoded, sent: float) -> bool:
        """Sends a message. `has_room` must have returned True. A thread sends the bytes that the network delays."""
        head = Frame(run, label, -1, len(message.layout), message.size, 0, 0.0).pack()
        unsent = [memoryview(head + message.layout), *message.pieces()]
        if not self._unsent:  # the writing thread is idle
            unsent = self._send_now(unsent, message.size)
        if unsent:  # copy: the caller may modify the tensors as soon as this returns
            memory, offset = codec.allocate_buffer(sum(map(len, unsent))).numpy().data, 0
            for piece in unsent:
                memory[offset : offset + len(piece)] = piece
                offset += len(piece)
            self._unsent += 1
            self._outbox.put(memory)
        return True

    def _send_now(self, pieces: list[memoryview], size: int) -> list[memoryview]:
        """Sends bytes while the network accepts them quickly, and returns the unsent bytes."""
        if isinstance(self._outgoing, ssl.SSLSocket):
            if size + len(pieces[0]) > RECORD_BYTES or not self._writable.poll(0):
                return pieces  # encryption takes longer than a copy
            try:
                self._outgoing.sendall(b"".join(pieces))
            except OSError as error:
                raise PeerClosed(str(error)) from error
            return []
        until = time.perf_counter() + size / FAST_BYTES_PER_SECOND
        while pieces:
            try:
                sent = self._outgoing.sendmsg(pieces, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.perf_counter() > until or not self._writable.poll(1):
                    break
                continue
            except OSError as error:
                raise PeerClosed(str(error)) from error
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]
        return pieces

    def flush(self) -> bool:
        """Returns True if all messages will arrive even if this process ends now."""
        self._read_notifications()
        return not self._unsent

    def head(self) -> Frame | None:
        self._read_notifications()
        return self._inbox[0][0] if self._inbox else None

    def _read_notifications(self) -> None:
        with suppress(BlockingIOError):
            self._unsent -= self._notified.recv(CHUNK_BYTES).count(b"w")
        if self._inbox:
            return
        if self._broken is not None:  # checked after the notifications, so that received messages come first
            raise self._broken
        if self.control.unreachable:  # the stream has no timeout while it is busy, and could wait for minutes
            raise PeerClosed("its host does not answer")

    def message(self, frame: Frame) -> Message:
        _, layout, tensors = self._inbox[0]
        return codec.assemble(layout, tensors)

    def done(self, frame: Frame) -> None:
        self._inbox.popleft()
        self._room.release()

    def _keep_reading(self) -> None:
        try:
            while True:
                frame = Frame.read(self._take(HEADER.size))
                if frame.slot >= 0 or frame.capacity:
                    raise CorruptMessage("a slot of shared memory, between hosts")
                layout = self._take(frame.layout)
                self._inbox.append((frame, layout, codec.read_elements(layout, frame.size, self._fill)))
                self._notify.send(b"r")
                self._room.acquire()
        except Exception as error:  # raised by the rank that waits
            if is_tampering(error):
                error = CorruptMessage(f"{ALTERED}: {error}")
            self._break(error if isinstance(error, (CorruptMessage, MemoryError)) else PeerClosed(str(error)))

    def _take(self, size: int) -> bytes:
        self._fill(memoryview(data := bytearray(size)))
        return bytes(data)

    def _fill(self, memory: memoryview) -> None:
        if self._ahead.readinto(memory) < len(memory):
            raise PeerClosed("the connection was closed")

    def _keep_writing(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
                self._outgoing.sendall(data)
                del data
                self._notify.send(b"w")
        except OSError as error:
            self._break(PeerClosed(str(error)))

    def _break(self, error: Exception) -> None:
        self._broken = self._broken or error
        with suppress(OSError):
            self._notify.send(b"!")

    def close(self) -> None:
        self.abandon()
        self._stream.close()
        self._room.release()
        for thread in self._threads:
            thread.join(1.0)
        self.drop()

    def abandon(self) -> None:
        self._outbox.put(None)
        super().abandon()
        with suppress(OSError):  # it is closed already
            socket.socket.shutdown(self._outgoing, socket.SHUT_RDWR)

    def drop(self) -> None:
        super().drop()
        self._ahead.raw.close()  # otherwise it keeps the stream open
        self._outgoing.close()
        self._notified.close()
        self._notify.close()
