"""What a process is at, for the others of its host to see: also when it is stuck or gone, and can say nothing."""

import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from gpipe.comm.frames import check_memory, make_memory
from gpipe.comm.limits import too_many_files
from gpipe.comm.local import Link
from gpipe.comm.untrusted import Damaged, damaged
from gpipe.errors import heard

_STATUS = struct.Struct("<IiI?d")
_AT_LAYERS, _AT_WAITS = 8, 12  # where these stand in it


class Seen(NamedTuple):
    """A process's run, its place in the row (-1 outside), the layers begun there, whether it waits, since when."""

    run: int
    at: int
    layers: int
    waits: bool
    since: float


class Status:
    """A process's own words on what it is at, in memory that the others of its host can read."""

    def __init__(self) -> None:
        self._handle = make_memory("gpipe status", _STATUS.size) if hasattr(os, "memfd_create") else None
        self._memory = bytearray(_STATUS.size) if self._handle is None else mmap.mmap(self._handle, _STATUS.size)
        self.layers = memoryview(self._memory)[_AT_LAYERS : _AT_LAYERS + 4].cast("I")  # [0]: how many began

    def reach(self, run: int, at: int) -> None:
        """Notes a place in the row."""
        _STATUS.pack_into(self._memory, 0, run, at, 0, False, time.monotonic())

    def wait(self, waits: bool) -> None:
        """Notes whether this process waits for another."""
        self._memory[_AT_WAITS] = waits

    def shared_with(
        self, links: Mapping[int, Link], limit: float, shown: Callable[[], object] = object
    ) -> dict[int, "Watched"]:
        """Lets the processes of this host read this, calls `shown`, and gives what they show before the limit."""
        local = {peer: link.news.connection for peer, link in links.items() if link.is_local}
        if self._handle is None:
            shown()
            return {}
        for connection in local.values():
            with suppress(ConnectionError):  # it is gone, see below
                socket.send_fds(connection, [b"."], [self._handle])
        shown()
        found = {}
        for peer, connection in local.items():
            handle = _shown(peer, connection, limit)
            try:
                check_memory(handle, _STATUS.size)
                found[peer] = Watched(mmap.mmap(handle, _STATUS.size, prot=mmap.PROT_READ))
            except Damaged as error:
                raise damaged(peer, error) from error
            finally:
                os.close(handle)
        os.close(self._handle)
        self._handle = None
        return found

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)


def _shown(peer: int, connection: socket.socket, limit: float) -> int:
    connection.settimeout(limit)
    try:
        _, handles, flags, _ = socket.recv_fds(connection, 1, 1)
    except TimeoutError:
        raise heard(f"rank {peer} did not link up within {limit:g} s", peer) from None
    except ConnectionError:
        handles, flags = [], 0
    if flags & socket.MSG_CTRUNC:
        raise too_many_files()
    if not handles:
        raise heard(f"rank {peer} is gone; it ended while the processes linked up", peer)
    connection.setblocking(False)
    return handles[0]


class Watched:
    """What another process is at."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def read(self) -> Seen:
        """Says where the process is just now."""
        return Seen(*_STATUS.unpack_from(self._memory))
