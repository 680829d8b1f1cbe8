"""Connects each pair of processes of a pipe, with several streams per connection.

Each process listens only while the processes connect. Within a host, a process listens at a Unix socket in a folder
that only its user can open. Between hosts, a process listens at an address that other hosts can reach. A process
accepts a connection only with a token derived from the addresses of all processes. With TLS, the connection also
needs a certificate of the authority.
"""

import fcntl
import hashlib
import hmac
import os
import secrets
import selectors
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpipe.distributed.communicator import all_gather_checked
from gpipe.distributed.connection import BLOCKED, Connection, TcpConnection
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.failures import REPORT_SECONDS, Status, StatusMemory, StatusQuery, map_status
from gpipe.distributed.folder_rendezvous import FolderRendezvous
from gpipe.distributed.mesh import Position
from gpipe.distributed.nccl import NcclGroups
from gpipe.distributed.network import family, listen, own_host
from gpipe.distributed.rendezvous import DESCRIPTOR_LIMITS, LINKING, Rendezvous
from gpipe.distributed.tls import Identity, is_tampering
from gpipe.errors import received_error

HELLO_BYTES = 48  # a token of 32 characters, the rank, and the name of the stream
STREAMS = ("messages", "control")
QUERY = "query"
STREAMS_BETWEEN_HOSTS = (*STREAMS, QUERY)
STREAMS_WITH_TLS = (*STREAMS, "back", QUERY)  # one stream of messages for each direction
WELCOME = b"+"
LONGEST_SILENCE = 30.0  # a host that does not answer for this time is lost, or earlier if the group's timeout is less
LINK_SECONDS = 60.0  # for all connections, after the addresses are known, or less if the group's timeout is less
SHARED_MEMORY = "/dev/shm"
POLL_SECONDS = 0.02  # between checks whether another process has failed


class Address(NamedTuple):
    """The address of a listening process.

    Attributes:
        folder: The folder with the Unix socket and the status of the process, for processes on the same host.
        host: The address for other hosts. Empty if all processes are on one host.
        port: The port for other hosts.
        nonce: A random string, which makes the token unpredictable.
    """

    folder: str
    host: str
    port: int
    nonce: str


def token_of(addresses: Sequence[Address]) -> str:
    """Returns the token that a process sends to show that it has received the addresses of all processes."""
    return hashlib.sha256(repr(addresses).encode()).hexdigest()[:32]


def hello(token: str, rank: int, stream: str) -> bytes:
    """Returns the first bytes of a connection: the token, the rank of the connecting process, and the stream."""
    return f"{token} {rank} {stream}".ljust(HELLO_BYTES).encode()


def connect(
    rendezvous: Rendezvous | FolderRendezvous,
    position: Position,
    groups: NcclGroups | None,
    silence: float | None = None,
) -> Endpoint:
    """Connects this process with all other processes of its pipe, and closes the rendezvous.

    All processes must call this function.

    Args:
        rendezvous: The rendezvous of these processes.
        position: The position of this process in the mesh.
        groups: The NCCL groups for tensors on GPUs, or None.
        silence: The number of seconds after which a host that does not answer counts as lost. Default: 30, or the
            timeout of the process group if the timeout is less.
    """
    hosts, tls = [rendezvous.hosts[member] for member in position.members], rendezvous.tls
    local = {peer for peer, host in enumerate(hosts) if host == hosts[position.rank]}
    silence = min(position.timeout, silence or LONGEST_SILENCE)
    remote_streams = STREAMS_WITH_TLS if tls else STREAMS_BETWEEN_HOSTS
    streams = {peer: STREAMS if peer in local else remote_streams for peer in range(len(hosts))}
    earlier, later = (
        [(peer, stream) for peer in peers for stream in streams[peer]]
        for peers in (range(position.rank), range(position.rank + 1, len(hosts)))
    )
    with ExitStack() as on_failure, listening(crosses_hosts=len(local) < len(hosts)) as listener:
        addresses = [Address(*remote) for remote in all_gather_checked(rendezvous, listener.address)]
        token = token_of(addresses)
        shared: dict[int, StatusMemory] = {}
        sockets: dict[tuple[int, str], socket.socket] = {}
        try:
            for peer in local - {position.rank}:
                shared[peer] = map_status(addresses[peer].folder)
            for peer, stream in earlier:
                greeting = hello(token, position.rank, stream)
                end = dial(addresses[peer], greeting, silence, local=peer in local, tls=tls)
                sockets[peer, stream] = on_failure.enter_context(end)
        except OSError as error:
            if error.errno not in DESCRIPTOR_LIMITS:
                rendezvous.check(0.0 if is_tampering(error) else REPORT_SECONDS)  # the peer may report the reason
                raise received_error(f"rank {peer} cannot be reached {LINKING}: {error}", peer) from error
            raise
        sockets |= listener.accept(later, token, min(LINK_SECONDS, position.timeout), rendezvous.check, tls)
        for (_, stream), end in sockets.items():
            on_failure.enter_context(end)
            _keep_alive(end, stream, silence)
        connections = {}
        for peer in sorted(streams.keys() - {position.rank}):
            ends = [sockets[peer, stream] for stream in streams[peer] if stream != QUERY]
            if streams[peer] == STREAMS_WITH_TLS and peer < position.rank:
                ends.reverse()  # the rank that dialed sends through "messages" and receives through "back"
            connections[peer] = (Connection if peer in local else TcpConnection)(*ends)
            on_failure.callback(connections[peer].close)
            connections[peer].host = f"host {hosts[peer].partition(' ')[0]}"
        query_streams = {peer: end for (peer, stream), end in sockets.items() if stream == QUERY}
        query = StatusQuery(query_streams, listener.status)
        on_failure.callback(query.close)
        endpoint = Endpoint(position.rank, connections, position.timeout, listener.status, shared, groups, query)
        rendezvous.close()
        on_failure.pop_all()
        return endpoint


def dial(
    address: Address, greeting: bytes, timeout: float, *, local: bool, tls: Identity | None = None
) -> socket.socket:
    """Connects to a listener and sends the greeting. With TLS, waits until the listener has accepted the greeting.

    Raises:
        ConnectionError: If the listener rejects the greeting.
        OSError: If the connection fails.
    """
    with ExitStack() as on_failure:
        end = on_failure.enter_context(socket.socket(socket.AF_UNIX if local else family(address.host)))
        end.settimeout(timeout)
        end.connect(f"{address.folder}/listener" if local else (address.host, address.port))
        if tls is None or local:
            end.sendall(greeting)
        else:
            end = on_failure.enter_context(tls.client.wrap_socket(end))
            with suppress(OSError):  # if the listener has closed, recv raises the reason that it sent
                end.sendall(greeting)
            if end.recv(1) != WELCOME:
                raise ConnectionError("it rejected the connection")
        end.settimeout(None)
        on_failure.pop_all()
        return end


@contextmanager
def listening(*, crosses_hosts: bool) -> Iterator["Listener"]:
    """Listens in the context: at a Unix socket, and if `crosses_hosts` also at an address for other hosts."""
    host, port = own_host() if crosses_hosts else "", 0
    os.close(os.open(os.devnull, os.O_RDONLY))  # raises EMFILE, which tempfile would hide
    with ExitStack() as opened:
        try:
            folder, status, local = _make_folder(opened, SHARED_MEMORY)
        except OSError:  # it is full, read-only or missing
            folder, status, local = _make_folder(opened, tempfile.gettempdir())
        sockets = [local]
        if crosses_hosts:
            sockets.append(opened.enter_context(listen(host)))
            port = sockets[1].getsockname()[1]
        yield Listener(Address(folder, host, port, secrets.token_hex(16)), sockets, status)


def _make_folder(opened: ExitStack, parent: str) -> tuple[str, Status, socket.socket]:
    """Creates a folder with the status and the Unix socket of this process.

    The folder is locked while it exists. Folders without a lock belong to killed processes, and are removed.
    """
    for leftover in Path(parent).glob("gpipe-[0-9]*-*"):
        with suppress(OSError), ExitStack() as closing:
            closing.callback(os.close, handle := os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if set(os.listdir(handle)) in ({"status"}, {"status", "listener"}):  # a new, empty one is not locked yet
                shutil.rmtree(leftover)
    name = f"gpipe-{os.getpid()}-"  # TemporaryDirectory creates it with mode 0700
    folder = opened.enter_context(tempfile.TemporaryDirectory("", name, parent, ignore_cleanup_errors=True))
    opened.callback(os.close, handle := os.open(folder, os.O_RDONLY))
    fcntl.flock(handle, fcntl.LOCK_EX)
    status, listener = Status.create_in(folder), opened.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(f"{folder}/listener")
    listener.listen(1024)
    return folder, status, listener


class Listener(NamedTuple):
    """The listening sockets of a process.

    Attributes:
        address: The address of the process.
        sockets: The Unix socket, and the TCP socket if there are other hosts.
        status: The status that other processes on the host can read.
    """

    address: Address
    sockets: Sequence[socket.socket]
    status: Status

    def accept(
        self,
        expected: Iterable[tuple[int, str]],
        token: str,
        seconds: float,
        check: Callable[[], None],
        tls: Identity | None = None,
    ) -> dict[tuple[int, str], socket.socket]:
        """Accepts the expected connections, and closes all other connections.

        A connection that sends no bytes or wrong bytes does not delay the other connections.

        Args:
            expected: Pairs of a rank and the name of a stream.
            token: The token that connections must send.
            seconds: The timeout.
            check: A function that raises an error if another process has failed. `accept` calls it regularly.
            tls: The TLS contexts, if connections from other hosts must use TLS.

        Returns:
            The sockets, by rank and stream.

        Raises:
            TimeoutError: If a connection is missing after the timeout.
        """
        missing = {hello(token, *each): each for each in expected}
        found: dict[tuple[int, str], socket.socket] = {}
        until = time.monotonic() + seconds
        with ExitStack() as accepted, selectors.DefaultSelector() as selector:
            for reached in self.sockets:
                selector.register(reached, selectors.EVENT_READ)
            while missing:
                check()
                if time.monotonic() > until:
                    ranks = sorted({peer for peer, _ in missing.values()})
                    raise TimeoutError(f"Ranks {ranks} did not connect within {seconds:g} s.")
                for key, _ in selector.select(POLL_SECONDS):
                    end: Any = key.fileobj
                    if key.data is None:
                        with suppress(ssl.SSLError, ConnectionError):  # it has closed already
                            end = accepted.enter_context(_accept(end, tls))
                            selector.register(end, selectors.EVENT_READ, bytearray())
                    elif _has_greeted(end, key.data):
                        selector.unregister(end)
                        greeting = next((one for one in missing if hmac.compare_digest(one, key.data)), None)
                        if greeting is None:
                            end.close()
                        else:
                            found[missing.pop(greeting)] = end
                            if isinstance(end, ssl.SSLSocket):
                                end.send(WELCOME)
            for key in selector.get_map().values():
                if key.data is not None:  # an unexpected connection with an incomplete greeting
                    key.fileobj.close()  # type: ignore[union-attr]  # a socket
            accepted.pop_all()
        for end in found.values():
            end.setblocking(True)
        return found


def _accept(listener: socket.socket, tls: Identity | None) -> socket.socket:
    end = listener.accept()[0]
    end.setblocking(False)
    if tls is None or end.family == socket.AF_UNIX:
        return end
    return tls.server.wrap_socket(end, server_side=True, do_handshake_on_connect=False)


def _has_greeted(connection: socket.socket, greeting: bytearray) -> bool:
    """Reads available bytes of a greeting. Returns whether the greeting is complete or the connection has ended."""
    try:
        more = connection.recv(HELLO_BYTES - len(greeting))
    except BLOCKED:
        return False
    except OSError:
        return True
    greeting += more
    return not more or len(greeting) == HELLO_BYTES


def _keep_alive(connection: socket.socket, stream: str, silence: float) -> None:
    """Makes a connection between hosts end if the peer's host does not answer for `silence` seconds.

    For streams of messages, the limit is active only while they are idle. Linux cannot distinguish a busy receiver
    with a full buffer from a receiver that does not answer. The other streams always have room, and detect an
    unreachable host in time.
    """
    if connection.family != socket.AF_UNIX:
        limits = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": max(round(silence), 1)}
        if stream in ("control", QUERY):
            limits["TCP_USER_TIMEOUT"] = round(silence * 1000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in limits.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
