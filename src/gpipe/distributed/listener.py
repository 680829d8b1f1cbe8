"""How the processes of a pipe connect: each gives all others the address where it listens; then a connection a pair.

Nothing listens but for this moment: within a host at a socket in a folder that only its user can enter, between hosts
at the address by which the others are reached, and only to who knows the token that was exchanged.
"""

import hmac
import os
import secrets
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple

from gpipe.distributed.agree import agree
from gpipe.distributed.connection import Connection, TcpConnection
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.failures import REPORT_SECONDS, Status
from gpipe.distributed.frames import LIMITS
from gpipe.distributed.mesh import Position
from gpipe.distributed.nccl import NcclGroups
from gpipe.distributed.rendezvous import LINKING, Rendezvous
from gpipe.errors import received

HELLO_BYTES = 48  # a token of 32, a rank, one of the streams
STREAMS = ("messages", "control")
LINK_SECONDS = 60.0  # for all to connect, once all have told their addresses, unless the group's timeout is less
POLL_SECONDS = 0.02  # between two looks whether another process has failed


class Address(NamedTuple):
    """Where a process listens, the token that those who connect must know, and a folder for those of its host."""

    folder: str
    host: str
    port: int
    token: str

    def hello(self, rank: int, stream: str) -> bytes:
        """What who connects has to say: who it is, and for which stream."""
        return f"{self.token} {rank} {stream}".ljust(HELLO_BYTES).encode()


def connect(rendezvous: Rendezvous, position: Position, groups: NcclGroups | None) -> Endpoint:
    """Connects this process with the others of its pipe, which do so at the same time; ends the rendezvous."""
    hosts = [rendezvous.hosts[member] for member in position.members]
    local = {peer for peer, host in enumerate(hosts) if host == hosts[position.rank]}
    with ExitStack() as on_failure, listening(crosses_hosts=len(local) < len(hosts)) as listener:
        status = Status.shown_in(listener.address.folder)
        addresses = [Address(*remote) for remote in agree(rendezvous, listener.address)]
        shared = {peer: Status.memory_in(addresses[peer].folder) for peer in local - {position.rank}}
        sockets: dict[tuple[int, str], socket.socket] = {}
        for peer, stream in product(range(position.rank), STREAMS):
            try:
                found = dial(addresses[peer], position.rank, stream, position.silence, local=peer in local)
            except OSError as error:
                if error.errno not in LIMITS:  # it soon says why, or is gone
                    rendezvous.check(REPORT_SECONDS)
                    raise received(f"rank {peer} cannot be reached {LINKING}: {error}", peer) from error
                raise
            sockets[peer, stream] = on_failure.enter_context(found)
        later = range(position.rank + 1, len(hosts))
        sockets |= listener.accept(later, min(LINK_SECONDS, position.timeout), rendezvous.check)
        for end in sockets.values():
            on_failure.enter_context(end)
            _keep_alive(end, position.silence)
        connections = {}
        for peer in (*range(position.rank), *later):
            kind = Connection if peer in local else TcpConnection
            connections[peer] = kind(*(sockets[peer, stream] for stream in STREAMS))
            on_failure.callback(connections[peer].close)
        endpoint = Endpoint(position.rank, connections, position.timeout, status, shared, groups)
        rendezvous.close()
        on_failure.pop_all()
        return endpoint


def dial(address: Address, rank: int, stream: str, seconds: float, *, local: bool) -> socket.socket:
    """Connects to a listener and says who this is."""
    connection = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
    try:
        connection.settimeout(seconds)
        connection.connect(f"{address.folder}/listener" if local else (address.host, address.port))
        connection.settimeout(None)
        connection.sendall(address.hello(rank, stream))
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def listening(*, crosses_hosts: bool) -> Iterator["Listener"]:
    """While others can connect to this process: by a path within the host, by an address only if there are others."""
    host, port = own_host() if crosses_hosts else "", 0
    os.close(os.open(os.devnull, os.O_RDONLY))  # raises where no file can be opened: tempfile would not say so
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # no disk behind what others look at
    made = tempfile.TemporaryDirectory(prefix=f"gpipe-{os.getpid()}-", dir=memory, ignore_cleanup_errors=True)
    with made as folder, ExitStack() as opened:  # of mode 0700
        sockets = [opened.enter_context(socket.socket(socket.AF_UNIX))]
        sockets[0].bind(f"{folder}/listener")
        sockets[0].listen(1024)
        if crosses_hosts:
            sockets.append(opened.enter_context(socket.create_server((host, 0), backlog=1024)))
            host, port = sockets[1].getsockname()
        yield Listener(Address(folder, host, port, secrets.token_hex(16)), sockets)


class Listener(NamedTuple):
    """Where a process can be reached, and the sockets that others come to."""

    address: Address
    sockets: Sequence[socket.socket]

    def accept(self, peers: range, seconds: float, check: Callable[[], None]) -> dict[tuple[int, str], socket.socket]:
        """Takes the connections of these peers, and keeps no stranger, nor waits for one.

        Args:
            peers: Who shall connect, once for each stream.
            seconds: In which all shall have connected.
            check: Raises if one of them has failed.
        """
        missing = {self.address.hello(peer, stream): (peer, stream) for peer in peers for stream in STREAMS}
        found: dict[tuple[int, str], socket.socket] = {}
        until = time.monotonic() + seconds
        with ExitStack() as accepted, selectors.DefaultSelector() as selector:
            for reached in self.sockets:
                selector.register(reached, selectors.EVENT_READ)
            while missing:
                check()
                if time.monotonic() > until:
                    ranks = sorted({peer for peer, _ in missing.values()})
                    raise TimeoutError(f"ranks {ranks} did not connect within {seconds:g} s")
                for key, _ in selector.select(POLL_SECONDS):
                    end: Any = key.fileobj
                    if key.data is None:
                        end = accepted.enter_context(end.accept()[0])
                        end.setblocking(False)
                        selector.register(end, selectors.EVENT_READ, bytearray())
                    elif _has_said_hello(end, key.data):
                        selector.unregister(end)
                        hello = next((hello for hello in missing if hmac.compare_digest(hello, key.data)), None)
                        if hello is None:
                            end.close()
                        else:
                            found[missing.pop(hello)] = end
            for key in selector.get_map().values():
                if key.data is not None:  # a stranger that has not said all
                    key.fileobj.close()  # type: ignore[union-attr]  # a socket
            accepted.pop_all()
        for end in found.values():
            end.setblocking(True)
        return found


def _has_said_hello(connection: socket.socket, said: bytearray) -> bool:
    """Takes what has come of a hello; whether that is all, or all that comes."""
    try:
        more = connection.recv(HELLO_BYTES - len(said))
    except BlockingIOError:
        return False
    except OSError:
        return True
    said += more
    return not more or len(said) == HELLO_BYTES


def _keep_alive(connection: socket.socket, silence: float) -> None:
    """Has a connection between hosts end after so many seconds without an answer."""
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_USER_TIMEOUT", round(silence * 1000))):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def own_host() -> str:
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
