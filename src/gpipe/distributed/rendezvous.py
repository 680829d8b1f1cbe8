"""How the processes of a pipe link up: each tells in the agreement where it can be reached; then a link a pair.

Nothing listens but for this moment: within a host at a socket in a folder that only its user can enter, between hosts
at the address by which the others are reached, and only to who knows the number that was exchanged.
"""

import hmac
import os
import secrets
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpipe.distributed.construction import LINKING, Agreement
from gpipe.distributed.failures import SOON
from gpipe.distributed.local import Link
from gpipe.distributed.tcp import RemoteLink
from gpipe.distributed.untrusted import LIMITS
from gpipe.errors import heard

HELLO = 48  # bytes: a token of 32, a rank, one of the streams
STREAMS = ("messages", "news")
LONGEST_FOLDER = 70  # characters: the path of a socket may have about 100
PATIENCE = 60.0  # seconds for all to connect, once all have said where they are, unless the group's timeout is less
TICK = 0.02  # seconds between two looks whether another process has failed


@dataclass(frozen=True)
class Door:
    """Where a process can be reached, and the number that its visitors must know."""

    path: str
    address: str
    port: int
    token: str


def connect(agreement: Agreement) -> dict[int, Link]:
    """Links this process with the others of its pipe, by their ranks there; all do so at the same time."""
    position = agreement.position
    assert position is not None
    hosts = [agreement.hosts[member] for member in position.members]
    peers = range(position.rank + 1, len(position.members))
    is_local = [host == hosts[position.rank] for host in hosts]
    pairs: dict[int, list[socket.socket]] = {}
    with _Listening(crosses_hosts=not all(is_local)) as own, _closed_on_failure(pairs):
        doors = [Door(**theirs["door"]) for theirs in agreement.tell(LINKING, door=asdict(own.door))]
        for peer in range(position.rank):
            pairs[peer] = _reach(agreement, peer, doors[peer], position.silence, local=is_local[peer])
        pairs |= own.welcome(peers, position.silence, min(PATIENCE, position.timeout), agreement.heed)
        return {peer: (Link if is_local[peer] else RemoteLink)(*pairs[peer]) for peer in sorted(pairs)}


@contextmanager
def _closed_on_failure(pairs: dict[int, list[socket.socket]]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for connection in [connection for pair in pairs.values() for connection in pair]:
            connection.close()
        raise


def _reach(agreement: Agreement, peer: int, door: Door, silence: float, *, local: bool) -> list[socket.socket]:
    """Connects to a process; if it cannot be reached, it soon says why, or is gone."""
    assert agreement.position is not None
    try:
        return _call(door, agreement.position.rank, silence, local=local)
    except OSError as error:
        if error.errno in LIMITS:
            raise
        agreement.heed(SOON)
        raise heard(f"rank {peer} cannot be reached {LINKING}: {error}", peer) from error


class _Listening:
    """A process while others can connect to it: by a path within the host, by an address only if there are others."""

    def __init__(self, *, crosses_hosts: bool) -> None:
        address, port = _own_address() if crosses_hosts else "", 0
        os.close(os.open(os.devnull, os.O_RDONLY))  # raises where no file can be opened: tempfile would not say so
        long = len(tempfile.gettempdir()) > LONGEST_FOLDER
        self._listeners: list[socket.socket] = []
        self._folder = tempfile.mkdtemp(prefix="gpipe-", dir="/tmp" if long else None)  # mode 0700
        try:
            path = str(Path(self._folder) / "door")
            self._listen(socket.AF_UNIX, path)
            if crosses_hosts:
                address, port = self._listen(socket.AF_INET, (address, 0))
        except BaseException:
            self.__exit__()
            raise
        self.door = Door(path, address, port, secrets.token_hex(16))

    def _listen(self, family: socket.AddressFamily, at: str | tuple[str, int]) -> Any:
        self._listeners.append(socket.socket(family))
        self._listeners[-1].bind(at)
        self._listeners[-1].listen(1024)
        return self._listeners[-1].getsockname()

    def __enter__(self) -> "_Listening":
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def welcome(
        self, peers: range, silence: float, patience: float, heed: Callable[[], None]
    ) -> dict[int, list[socket.socket]]:
        """Takes the connections of these peers: of each the stream, then the news.

        Args:
            peers: Who shall come.
            silence: Seconds without an answer after which a host is gone, from then on.
            patience: Seconds in which all shall have come.
            heed: Raises if one of them has failed.
        """
        found: dict[int, dict[str, socket.socket]] = {peer: {} for peer in peers}
        until = time.monotonic() + patience
        with ExitStack() as visitors, selectors.DefaultSelector() as doors:
            visitors.callback(_close_unless_whole, found)
            for listener in self._listeners:
                doors.register(listener, selectors.EVENT_READ)
            while missing := [peer for peer, two in found.items() if len(two) < len(STREAMS)]:
                heed()
                if time.monotonic() > until:
                    raise TimeoutError(f"ranks {missing} did not connect within {patience:g} s")
                for key, _ in doors.select(TICK):
                    if (visitor := key.data) is None:
                        visitor = _Visitor(key.fileobj.accept()[0])  # type: ignore[union-attr]  # a listener
                        doors.register(visitor, selectors.EVENT_READ, visitor)
                        visitors.callback(visitor.leave)
                    elif not visitor.listen():
                        doors.unregister(visitor)
                        self._admit(visitor, silence, found)
        return {peer: [two[which] for which in STREAMS] for peer, two in found.items()}

    def _admit(self, visitor: "_Visitor", silence: float, found: dict[int, dict[str, socket.socket]]) -> None:
        """Has one of ours stay, and a stranger leave."""
        token, rank, which, *_ = [*visitor.said.decode("ascii", "replace").split(), "", "", ""]
        known = {str(peer): peer for peer in found}
        if hmac.compare_digest(token.encode(), self.door.token.encode()) and rank in known and which in STREAMS:
            visitor.connection.setblocking(True)
            found[known[rank]][which] = _prepared(visitor.connection, silence)
            visitor.is_ours = True
        visitor.leave()


def _close_unless_whole(found: Mapping[int, Mapping[str, socket.socket]]) -> None:
    if any(len(two) < len(STREAMS) for two in found.values()):
        for connection in [connection for two in found.values() for connection in two.values()]:
            connection.close()


class _Visitor:
    """Who has connected, and has not said yet who it is: it may say nothing, and nobody waits for it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.said = bytearray()
        self.is_ours = False

    def fileno(self) -> int:
        """What to poll."""
        return self.connection.fileno()

    def listen(self) -> bool:
        """Takes what it says; whether there may be more."""
        try:
            more = self.connection.recv(HELLO - len(self.said))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.said += more
        return bool(more) and len(self.said) < HELLO

    def leave(self) -> None:
        """Shuts it out, unless it is one of ours."""
        if not self.is_ours:
            self.connection.close()


def _call(door: Door, rank: int, silence: float, *, local: bool) -> list[socket.socket]:
    made: dict[str, socket.socket] = {}
    try:
        for which in STREAMS:
            if local:
                made[which] = socket.socket(socket.AF_UNIX)
                made[which].connect(door.path)
            else:
                made[which] = socket.create_connection((door.address, door.port), timeout=silence)
                made[which].settimeout(None)
            made[which].sendall(f"{door.token} {rank} {which}".ljust(HELLO).encode())
            _prepared(made[which], silence)
    finally:
        _close_unless_whole({rank: made})
    return [made[which] for which in STREAMS]


def _prepared(connection: socket.socket, silence: float) -> socket.socket:
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_USER_TIMEOUT", round(silence * 1000))):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _own_address() -> str:
    """The address of this host by which the others of the world reach it."""
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((first, 9))  # sends nothing, but chooses the way
        found = str(probe.getsockname()[0])
    if found.startswith("127."):
        raise ValueError(
            f"the processes are on several hosts, but MASTER_ADDR={first} is the loopback address on this one; give "
            f"torchrun the first host's address in their network: --rdzv-endpoint=ADDRESS:PORT"
        )
    return found
