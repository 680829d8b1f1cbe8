"""The connection to a process of another host."""

import select
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from queue import SimpleQueue

from gpipe.distributed.codec import Buffer, Encoded
from gpipe.distributed.frames import CHUNK, HEADER, SLOTS, Frame, Gone, header
from gpipe.distributed.local import Link
from gpipe.distributed.untrusted import Damaged
from gpipe.stages.messages import Label

BELIEVED = 2**26  # bytes that a message is said to have and that are allocated before they are here
LAST_ANSWER = 56  # where in Linux's tcp_info stands how long ago the other end last answered, in ms


class RemoteLink(Link):
    """The connection to a process of another host: threads read and write while the rank computes."""

    is_local = False

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
        self._damaged: Damaged | None = None
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

    def put(self, run: int, label: Label, message: Encoded, sent: float) -> bool:
        """Puts a message on its way, for which there must be room; it leaves by itself."""
        head = header(run, label, -1, len(message.layout), message.size, 0, 0.0)
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
        return True

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
        with suppress(BlockingIOError):
            self._unsent -= self._bell.recv(CHUNK).count(b"w")
        if self._damaged is not None and not self._inbox:  # after the bell: what it rang for is there by now
            raise self._damaged
        if self._broken is not None and not self._inbox:
            raise Gone(self._broken)

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
                frame = Frame.read(_receive(self._stream, HEADER.size))
                if frame.slot >= 0 or frame.capacity:
                    raise Damaged("a slot of memory, between hosts")
                layout = bytes(_receive(self._stream, frame.layout))
                self._inbox.append((frame, layout, _receive(self._stream, frame.size)))
                self._ring.send(b"r")
                self._room.acquire()
        except Damaged as error:
            self._damaged = error
            self._break(ConnectionError(str(error)))
        except (OSError, MemoryError) as error:
            self._break(OSError(str(error)))

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
    """So many bytes; where they are very many, there is room for twice as many as have come."""
    data, done = bytearray(min(size, BELIEVED)), 0
    while done < size:
        if done == len(data):
            data.extend(bytes(min(size - done, done)))
        with memoryview(data) as view:
            count = stream.recv_into(view[done:])
        if not count:
            raise Gone("the connection was closed")
        done += count
    return data
