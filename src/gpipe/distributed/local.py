"""The link to one other process: a stream of messages each way, and beside it one for news; also the base of tcp.py.

A message is a frame: a header of fixed layout, the layout of its tensors, and their bytes (codec.py). What is small
goes through the stream itself. Within a host what is large goes through one of a few slots of shared memory, and the
stream says which: memory without a name, that is gone with the last process that has it. Between hosts two threads
keep a few messages under way.

News are what must never wait behind messages: that a slot is free again, that a rank failed, that a process is gone.
"""

import json
import os
import select
import socket
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from gpipe.distributed.codec import Buffer, Encoded
from gpipe.distributed.frames import (
    FAILED,
    FREE,
    HEADER,
    IN_SLOT,
    SLOTS,
    Arrived,
    Frame,
    Gone,
    News,
    Slot,
    check_memory,
    header,
    make_memory,
)
from gpipe.distributed.untrusted import Damaged, reading
from gpipe.stages.messages import Label

INLINE = 2**15
"""Bytes up to which tensors go through the stream: there two processes take about 25 us."""

Piece: TypeAlias = bytes | bytearray | memoryview


class Link:
    """The connection to a process of this host.

    Nothing here waits: `poll` what `fileno` gives, for reading before `head`, for writing while `flush` is False.
    """

    is_local = True

    def __init__(self, stream: socket.socket, news: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self.news = News(news)
        self.reports: list[Mapping[str, Any]] = []
        self._arrived = Arrived(stream)
        self._head: Frame | None = None
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
                self.reports.append(_read_report(what))

    def events(self, *, reading: bool, writing: bool) -> int:
        """What to poll for: news of free slots come by `news`."""
        return (select.POLLIN if reading else 0) | (select.POLLOUT if writing and self._leaving else 0)

    def has_room(self, size: int) -> bool:
        """Whether a message of so many bytes can be put on its way now."""
        if self._leaving and not self.flush():
            return False
        return size <= INLINE or len(self._own) < SLOTS or not all(slot.taken for slot in self._own)

    def want_room(self) -> None:
        """Asks to be told when there may be room again."""
        for slot in self._own:
            slot.want()

    def put(self, run: int, label: Label, message: Encoded, sent: float) -> bool:
        """Puts a message on its way, for which there must be room; what the stream does not take is for `flush`.

        Returns:
            Whether the stream took all of it.
        """
        layout, size = message.layout, message.size
        if size <= INLINE or not hasattr(os, "memfd_create"):
            head = header(run, label, -1, len(layout), size, 0, sent)
            return self._send([head, layout, *message.pieces()], len(head) + len(layout) + size)
        at = self._slot_of(size)
        slot = self._own[at]
        message.write(torch.frombuffer(slot.memory, dtype=torch.uint8, offset=IN_SLOT))
        slot.take()
        handle, slot.untold = slot.untold, None
        capacity = slot.capacity if handle is not None else 0
        head = header(run, label, at, len(layout), size, capacity, sent)
        return self._send([head, layout], len(head) + len(layout), handle)

    def _slot_of(self, size: int) -> int:
        """A free slot that is large enough; made, if there is none."""
        free = [at for at, slot in enumerate(self._own) if not slot.taken]
        for at in free:
            if self._own[at].capacity >= size:
                return at
        capacity = 1 << (size - 1).bit_length()
        handle = make_memory("gpipe", IN_SLOT + capacity)
        slot = Slot(handle, capacity)
        slot.untold = handle
        if len(self._own) < SLOTS:
            self._own.append(slot)
            return len(self._own) - 1
        old, self._own[free[0]] = self._own[free[0]], slot  # instead of one that is too small, at both ends
        if old.untold is not None:
            os.close(old.untold)
        return free[0]

    def _send(self, pieces: Sequence[Piece], size: int, handle: int | None = None) -> bool:
        """Gives the stream what it takes, a handle with the first byte; the rest is left for `flush`."""
        try:
            handles = [] if handle is None else [handle]
            sent = socket.send_fds(self._stream, pieces, handles) if handles else self._stream.sendmsg(pieces)
        except BlockingIOError:
            self._leaving, self._handle = b"".join(pieces), handle
            return False
        except OSError as error:
            raise Gone(str(error)) from error
        if handle is not None:
            os.close(handle)
        self._leaving = b"" if sent == size else b"".join(pieces)[sent:]
        self._handle = None
        return not self._leaving

    def flush(self) -> bool:
        """Sends what is left of a message; whether nothing is."""
        return not self._leaving or self._send([self._leaving], len(self._leaving), self._handle)

    def has_left(self) -> bool:
        """Whether all messages are on their way, and would arrive also if this process ended now."""
        return self.flush()

    @property
    def silent(self) -> float:
        """Seconds for which the other host has answered nothing."""
        return 0.0

    def head(self) -> Frame | None:
        """The next message's header, once the message is here; None before."""
        if self._head is None:
            frame = self._arrived.first()
            if frame is not None and frame.capacity:
                self._open_slot(frame)
            if frame is not None and frame.slot >= 0:
                slot = self._theirs.get(frame.slot)
                if slot is None or frame.size > slot.capacity:
                    raise Damaged(f"a message of {frame.size} bytes in a slot that has no room for it")
            self._head = frame
        return self._head

    def _open_slot(self, frame: Frame) -> None:
        if not self._arrived.handles:
            raise Damaged("a new slot without a handle")
        handle = self._arrived.handles.popleft()
        try:
            check_memory(handle, IN_SLOT + frame.capacity)
            self._theirs[frame.slot] = Slot(handle, frame.capacity)
        finally:
            os.close(handle)

    def message(self, frame: Frame) -> tuple[bytes, Buffer, int]:
        """The layout of the next message, where its tensors' bytes are, and from where on; until `done`."""
        arrived = self._arrived
        start = arrived.start + HEADER.size
        behind = start + frame.layout
        layout = bytes(arrived.memory[start:behind])
        if frame.slot < 0:
            return layout, arrived.memory, behind
        return layout, self._theirs[frame.slot].memory, IN_SLOT

    def done(self, frame: Frame) -> None:
        """Goes on to the next message, and lets the other end use the memory of this one again."""
        self._head = None
        self._arrived.drop()
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
        for handle in (*self._arrived.handles, *untold):
            if handle is not None:
                os.close(handle)
        self._handle = None
        for held in (self._arrived.handles, self._own, self._theirs):
            held.clear()


TYPES_OF_REPORT = {"run": int, "rank": int, "type": str, "message": str, "traceback": str}


def _read_report(told: bytes) -> Mapping[str, Any]:
    with reading("a report"):
        return checked_report(json.loads(told.decode("utf-8", "surrogatepass")))


def checked_report(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The report, which must be one."""
    if {name: type(value) for name, value in report.items()} != TYPES_OF_REPORT:
        raise ValueError(f"{sorted(report)}")
    return report
