"""The connection to one other process: a stream of messages each way, and beside it a control channel.

A message is a frame: a header of fixed layout, the layout of its tensors, and their bytes (codec.py). What is small
goes through the stream itself. Within a host what is large goes through one of a few slots of shared memory, and the
stream says which: memory without a name, that is gone with the last process that has it. Between hosts two threads
keep a few messages under way.

The control channel carries what must never wait behind messages: that a rank failed, that a process is gone, and, as
an empty message, that a slot is free again.

What a peer sends is believed only as far as it can be: a hostile message costs no memory and no process.

Note "By hand". Of what frames messages already, gloo cannot be polled, wakes nobody when another fails, and takes two
to three times as long for 4 KiB (dev/log.md, 2026-11-20); multiprocessing's Connection waits in the middle of a
message, and unpickles; safetensors knows neither strides and alignment nor what is no tensor. Here nothing waits, a
peer's death is seen at once, and no more memory is taken than has come.
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

from gpipe.distributed.codec import Damaged, Encoded, Gone, assemble, decode, elements, room
from gpipe.distributed.tls import altered
from gpipe.stages.messages import Label, Message

BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
CUT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # nothing comes from a host, not even that it hung up
ALTERED = "bytes that were altered on their way, or taken for that"
RECORD_BYTES = 2**14  # that TLS encrypts at a time
SLOTS = 4  # messages that may be under way from one process to another and not yet taken
CHUNK_BYTES = 2**16
LARGEST_LAYOUT_BYTES = 2**26  # bytes: some hundred thousand tensors; a message that says so gets them at once
LARGEST_CONTROL_BYTES = 2**20
HEADER = struct.Struct("<IiI?hIQQd")
_CONTROL = struct.Struct("<I")
_HANDLES = socket.CMSG_SPACE(64)  # bytes, room for the handles that come at once
MOST_HANDLES = 2**10  # those of new slots, not read yet: messages that small fit into the sockets' own memory
LAST_ANSWER = 56  # where in Linux's tcp_info stands how long ago the other end last answered, in ms
INLINE_BYTES = 2**15  # up to which tensors go through the stream: there two processes take about 25 us
SLOT_HEADER_BYTES = 64  # where in a slot the message begins
SOON_PER_SECOND = 2**32  # bytes: who sends waits for a network that is as fast, and leaves a copy to a slower one


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
        run, route, micro_batch, gradient, *rest = HEADER.unpack_from(memory, start)
        frame = cls(run, Label(route, micro_batch, gradient), *rest)
        is_sound = -1 <= frame.slot < SLOTS and frame.layout <= LARGEST_LAYOUT_BYTES
        if not is_sound or max(frame.size, frame.capacity) >= 2**62:
            raise Damaged(f"a header that gpipe does not send: {frame}")
        return frame

    def pack(self) -> bytes:
        return HEADER.pack(self.run, *self.label, *self[2:])


class Arrived:
    """What came by a stream and is not taken yet: in `memory` from `start` to `end`.

    The memory is kept; only for a message that needs more there is a larger one.
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
        self.gone = self.cut = False
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
        except BLOCKED:
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
        except BLOCKED:
            pass
        except OSError as error:
            self.gone, self.cut = True, error.errno in CUT
            if altered(error):
                raise Damaged(f"{ALTERED}: {error}") from error
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


class Slot:
    """Shared memory for one message, mapped from a handle.

    Ahead of the message stand two bytes: whether it is taken, written by both ends, and whether the sender waits for
    any slot to be free, and is to get a message then. So most messages need no other.

    `unsent` is the handle that the other end must still be sent; also if an interrupt came in between.
    """

    def __init__(self, handle: int, capacity: int) -> None:
        self.capacity = capacity
        self.unsent: int | None = None
        self.memory = mmap.mmap(handle, SLOT_HEADER_BYTES + capacity)

    @classmethod
    def make(cls, capacity: int) -> "Slot":
        """A new one, in memory without a name; whoever has it cannot take it away from the others."""
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
    def of_other(cls, handle: int, capacity: int) -> "Slot":
        """One of the other end, if its memory is of this size for good: else reading it could kill this process."""
        sealed = 0
        try:
            with suppress(OSError):  # no such memory at all
                sealed = fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(handle).st_size != SLOT_HEADER_BYTES + capacity:
                raise Damaged(f"a handle of memory that is not {SLOT_HEADER_BYTES + capacity} bytes for good")
            return cls(handle, capacity)
        finally:
            os.close(handle)

    @property
    def taken(self) -> bool:
        return bool(self.memory[0])


class Connection:
    """The connection to a process of this host.

    Nothing here waits: `poll` what `fileno` gives, for reading before `head`, for writing while `flush` is False.
    """

    host = "another host"  # or its name

    def __init__(self, stream: socket.socket, control: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self.control = ControlChannel(control)
        self._arrived = Arrived(stream)
        self._head: Frame | None = None
        self._leaving = b""
        self._leaving_slot: Slot | None = None  # whose handle goes with that
        self._own: list[Slot] = []
        self._theirs: dict[int, Slot] = {}

    def fileno(self) -> int:
        return self._stream.fileno()

    def events(self, *, reading: bool, writing: bool) -> int:
        """What to poll for: that a slot is free comes by `control`."""
        return (select.POLLIN if reading else 0) | (select.POLLOUT if writing and self._leaving else 0)

    def has_room(self, size: int) -> bool:
        """Whether a message of so many bytes can be put on its way now."""
        if self._leaving and not self.flush():
            return False
        return size <= INLINE_BYTES or len(self._own) < SLOTS or not all(slot.taken for slot in self._own)

    def want_room(self) -> None:
        for slot in self._own:
            slot.memory[1] = 1

    def put(self, run: int, label: Label, message: Encoded, sent: float) -> bool:
        """Puts a message on its way, for which there must be room; whether the stream took all: else `flush`."""
        layout, size = message.layout, message.size
        if size <= INLINE_BYTES or not hasattr(os, "memfd_create"):
            return self._send(Frame(run, label, -1, len(layout), size, 0, sent).pack(), layout, *message.pieces())
        at = self._free_slot(size)
        slot = self._own[at]
        message.write(torch.frombuffer(slot.memory, dtype=torch.uint8, offset=SLOT_HEADER_BYTES))
        slot.memory[0] = 1
        capacity = 0 if slot.unsent is None else slot.capacity
        return self._send(Frame(run, label, at, len(layout), size, capacity, sent).pack(), layout, slot=slot)

    def _free_slot(self, size: int) -> int:
        """A free slot that is large enough; if there is none, a new one, at both ends in place of one too small."""
        free = [at for at, slot in enumerate(self._own) if not slot.taken]
        for at in free:
            if self._own[at].capacity >= size:
                return at
        slot = Slot.make(1 << (size - 1).bit_length())
        if len(self._own) < SLOTS:
            self._own.append(slot)
            return len(self._own) - 1
        old, self._own[free[0]] = self._own[free[0]], slot
        if old.unsent is not None:
            os.close(old.unsent)
        return free[0]

    def _send(self, *pieces: bytes | bytearray | memoryview, slot: Slot | None = None) -> bool:
        """Gives the stream what it takes, a new slot's handle with the first byte; the rest is left for `flush`."""
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
            raise Gone(str(error)) from error
        left = sum(memoryview(piece).nbytes for piece in pieces) - sent
        self._leaving, self._leaving_slot = (b"".join(pieces)[-left:], slot) if left else (b"", None)
        return not left

    def flush(self) -> bool:
        """Sends what is left of a message; whether nothing is, and all arrives also if this process ends now."""
        return not self._leaving or self._send(self._leaving, slot=self._leaving_slot)

    def head(self) -> Frame | None:
        """The next message's header, once the message is here; None before."""
        if self._head is None and (frame := self._arrived.first()) is not None:
            if frame.capacity:
                if not self._arrived.handles:
                    raise Damaged("a new slot without a handle")
                self._theirs[frame.slot] = Slot.of_other(self._arrived.handles.popleft(), frame.capacity)
            if frame.slot >= 0:
                slot = self._theirs.get(frame.slot)
                if slot is None or frame.size > slot.capacity:
                    raise Damaged(f"a message of {frame.size} bytes in a slot that has no room for it")
            self._head = frame
        return self._head

    def message(self, frame: Frame) -> Message:
        """The next message, which stays the next until `done`."""
        arrived = self._arrived
        start = arrived.start + HEADER.size
        behind = start + frame.layout
        layout = bytes(arrived.memory[start:behind])
        if frame.slot < 0:
            return decode(layout, arrived.memory, behind, size=frame.size)
        return decode(layout, self._theirs[frame.slot].memory, SLOT_HEADER_BYTES, size=frame.size)

    def done(self, frame: Frame) -> None:
        """Goes on to the next message, and lets the other end use the memory of this one again."""
        self._head = None
        self._arrived.drop()
        if frame.slot >= 0:
            memory = self._theirs[frame.slot].memory
            memory[0] = 0
            if memory[1]:
                memory[1] = 0
                self.control.send(b"")

    def drop(self) -> None:
        """Lets go of a connection, with which another process may go on: the one that this one was forked from."""
        self._stream.close()
        self.control.socket.close()
        for handle in (*self._arrived.handles, *(slot.unsent for slot in self._own)):
            if handle is not None:
                os.close(handle)
        for held in (self._arrived.handles, self._own, self._theirs):
            held.clear()

    close = drop  # nothing else has to end


class TcpConnection(Connection):
    """The connection to a process of another host: threads read and write while the rank computes.

    They may read from one stream and write to another: what is encrypted no two threads can use at a time.
    """

    def __init__(self, stream: socket.socket, control: socket.socket, outgoing: socket.socket | None = None) -> None:
        super().__init__(stream, control)
        self._outgoing = outgoing or stream
        for end in (stream, self._outgoing):
            end.setblocking(True)
        # what is small is read with what follows, what is large into its place
        self._ahead = BufferedReader(stream.makefile("rb", 0), CHUNK_BYTES)
        self._writable = select.poll()
        self._writable.register(self._outgoing, select.POLLOUT)
        self._bell, self._ring = socket.socketpair()  # a byte whenever a thread has something new
        self._bell.setblocking(False)
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
        return self._bell.fileno()

    def events(self, *, reading: bool, writing: bool) -> int:
        return select.POLLIN if reading or writing else 0

    def has_room(self, size: int) -> bool:
        self._take_news()
        return self._unsent < SLOTS

    def put(self, run: int, label: Label, message: Encoded, sent: float) -> bool:
        """Puts a message on its way, for which there must be room; it leaves by itself."""
        head = Frame(run, label, -1, len(message.layout), message.size, 0, 0.0).pack()
        left = [memoryview(head + message.layout), *message.pieces()]
        if not self._unsent:  # nobody else writes
            left = self._send_now(left, message.size)
        if left:  # the tensors may be changed as soon as this returns
            memory, at = room(sum(map(len, left))).numpy().data, 0
            for piece in left:
                memory[at : at + len(piece)] = piece
                at += len(piece)
            self._unsent += 1
            self._outbox.put(memory)
        return True

    def _send_now(self, pieces: list[memoryview], size: int) -> list[memoryview]:
        """Sends what the network takes soon, as long as it takes more in each ms; gives what is left."""
        if isinstance(self._outgoing, ssl.SSLSocket):
            if size + len(pieces[0]) > RECORD_BYTES or not self._writable.poll(0):
                return pieces  # to encrypt takes longer than to copy
            try:
                self._outgoing.sendall(b"".join(pieces))
            except OSError as error:
                raise Gone(str(error)) from error
            return []
        until = time.perf_counter() + size / SOON_PER_SECOND
        while pieces:
            try:
                sent = self._outgoing.sendmsg(pieces, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.perf_counter() > until or not self._writable.poll(1):
                    break
                continue
            except OSError as error:
                raise Gone(str(error)) from error
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]
        return pieces

    def flush(self) -> bool:
        """Whether all messages are on their way, and arrive also if this process ends now."""
        self._take_news()
        return not self._unsent

    def head(self) -> Frame | None:
        self._take_news()
        return self._inbox[0][0] if self._inbox else None

    def _take_news(self) -> None:
        with suppress(BlockingIOError):
            self._unsent -= self._bell.recv(CHUNK_BYTES).count(b"w")
        if self._inbox:
            return
        if self._broken is not None:  # after the bell: what it rang for is there by now
            raise self._broken
        if self.control.cut:  # the stream itself may wait for minutes: nothing limits that while a host is busy
            raise Gone("its host answers nothing")

    def message(self, frame: Frame) -> Message:
        _, layout, tensors = self._inbox[0]
        return assemble(layout, tensors)

    def done(self, frame: Frame) -> None:
        self._inbox.popleft()
        self._room.release()

    def _keep_reading(self) -> None:
        try:
            while True:
                frame = Frame.read(self._take(HEADER.size))
                if frame.slot >= 0 or frame.capacity:
                    raise Damaged("a slot of memory, between hosts")
                layout = self._take(frame.layout)
                self._inbox.append((frame, layout, elements(layout, frame.size, self._fill)))
                self._ring.send(b"r")
                self._room.acquire()
        except Exception as error:  # whoever waits is to know
            if altered(error):
                error = Damaged(f"{ALTERED}: {error}")
            self._break(error if isinstance(error, (Damaged, MemoryError)) else Gone(str(error)))

    def _take(self, size: int) -> bytes:
        self._fill(memoryview(data := bytearray(size)))
        return bytes(data)

    def _fill(self, memory: memoryview) -> None:
        if self._ahead.readinto(memory) < len(memory):
            raise Gone("the connection was closed")

    def _keep_writing(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
                self._outgoing.sendall(data)
                del data
                self._ring.send(b"w")
        except OSError as error:
            self._break(Gone(str(error)))

    def _break(self, error: Exception) -> None:
        self._broken = self._broken or error
        with suppress(OSError):
            self._ring.send(b"!")

    def close(self) -> None:
        self._outbox.put(None)
        for end in (self._stream, self._outgoing, self.control.socket):
            with suppress(OSError):  # that of ssl has a thread that still sends do so in the clear
                socket.socket.shutdown(end, socket.SHUT_RDWR)
        self._stream.close()
        self._room.release()
        for thread in self._threads:
            thread.join(1.0)
        self.drop()

    def drop(self) -> None:
        super().drop()
        self._ahead.raw.close()  # which holds the stream open
        self._outgoing.close()
        self._bell.close()
        self._ring.close()
