"""While a pipe is built: the processes come together and settle what it is, and none waits for one that has failed.

All go through the same phases and exchange something at the end of each. So who is gone, or sends nothing, is in the
phase in which the others wait for it.

In the last each gives all others the address where it listens; then they make a connection a pair. Nothing listens
but for this moment: within a host at a socket in a folder that only its user can enter, between hosts at the address
by which the others are reached, and only to who knows the addresses of all, or by TLS who has a certificate as well.
"""

import atexit
import errno
import fcntl
import hashlib
import hmac
import logging
import math
import os
import resource
import secrets
import selectors
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.distributed.agree import Communicator, agree, versions
from gpipe.distributed.codec import reading
from gpipe.distributed.connection import BLOCKED, Connection, TcpConnection
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.failures import (
    LONG_WAIT_SECONDS,
    REPORT_SECONDS,
    SILENT_SECONDS,
    Memory,
    Questions,
    Report,
    Status,
)
from gpipe.distributed.mesh import Position, host_name, timeout_of_world
from gpipe.distributed.nccl import NcclGroups
from gpipe.distributed.network import family, listen, own_host
from gpipe.distributed.tls import Identity, altered, check_authorities, identity
from gpipe.errors import RemoteError, received

if TYPE_CHECKING:
    from gpipe.distributed.survivors import Meeting

logger = logging.getLogger("gpipe")

COMING = "before it came to build the pipe, or as it began"
SETTLING = "while it settled what the pipe is made of"
BUILDING = "while it built its layers"
LINKING = "while the processes linked up"
BETTER_REASON_SECONDS = 0.2  # from the first bad news on, in which a better reason may come

VALUE, LEFT, LAST, FAILURE = b"=", b"-", b".", b"!"  # the first byte of a message
ATTEMPT_BYTES = 8  # behind it: which rendezvous of this group it is of
TAG = 0x67700000  # of messages; whoever else sends through this group counts from 0
FOREVER = timedelta(days=365)
LARGEST_MESSAGE_BYTES = 2**26
FAREWELL_SECONDS = 1.0  # that a process which fails waits for the others to take that in

HELLO_BYTES = 48  # a token of 32, a rank, one of the streams
STREAMS = ("messages", "control")
QUESTIONS = "questions"
BETWEEN_HOSTS = (*STREAMS, QUESTIONS)
BY_TLS = (*STREAMS, "back", QUESTIONS)  # messages have one each way
WELCOME = b"+"
LONGEST_SILENCE = 30.0  # seconds after which a host that answers nothing is gone, unless the group's timeout is less
LINK_SECONDS = 60.0  # for all to connect, once all have told their addresses, unless the group's timeout is less
MEMORY = "/dev/shm"  # no disk behind what others look at
LIMITS = (errno.EMFILE, errno.ENFILE)
POLL_SECONDS = 0.02  # between two looks whether another process has failed

_attempts: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()  # the last that this process knows of
_channels: "dict[dist.ProcessGroup, WorldChannel]" = {}  # those on which more may come, also of what failed
_gloo: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()


def gloo_group() -> dist.ProcessGroup:
    """The world's group, or one beside it that uses gloo; all processes of the world call it."""
    world = dist.group.WORLD
    assert world is not None
    if "cpu:gloo" in str(dist.get_backend_config()):
        return world
    if world not in _gloo:
        _gloo[world] = dist.new_group(backend="gloo")
    return _gloo[world]


class WorldChannel:
    """Sends messages to all other processes, and has theirs in `received`, by sender, as soon as they are here.

    gloo reports a death at once, but only to who waits for a message from that very process; torch's store reports
    none. So a thread for each other process waits for its next message, as long as the rendezvous lasts; an empty one
    stands for the end of a process.

    After a rendezvous that failed the next one goes on with the same threads: who missed the first reads past it.

    A thread that waits in gloo while the interpreter ends would take the process down with it, should the other end
    be gone just then. So whoever leaves early waits a little for the others, and hangs up at the end.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.received: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self.peers = [peer for peer in range(dist.get_world_size()) if peer != dist.get_rank()]
        self._group = group
        self._listens: set[int] = set()  # to whom a thread listens
        self._threads: list[threading.Thread] = []
        self._sends = threading.Lock()
        atexit.register(self._hang_up)

    def listen(self, *peers: int) -> None:
        """Has a thread receive what each of them sends, up to the end of a rendezvous."""
        for peer in {*peers} - self._listens:
            self._listens.add(peer)
            self._start(f"gpipe receives {peer}", self._receive_all, peer)

    def send(self, message: bytes) -> None:
        """Sends a message to all others, and waits for nobody; an interrupt does not cut it in two."""
        is_sent = threading.Event()
        self._start("gpipe sends", self._send_all, message, is_sent)
        is_sent.wait()

    def close(self, seconds: float = FAREWELL_SECONDS) -> None:
        """Waits until all have sent and received all; threads go on with it, for those who come late."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            _channels.pop(self._group, None)  # it may be closed, and then what is built may fail
            atexit.unregister(self._hang_up)

    def _start(self, name: str, work: Callable[..., None], *given: object) -> None:
        self._threads.append(threading.Thread(target=work, args=given, name=name, daemon=True))
        self._threads[-1].start()

    def _send_all(self, message: bytes, is_sent: threading.Event) -> None:
        size = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        under_way: list[dist.Work] = []
        for peer in self.peers:
            with self._sends, suppress(RuntimeError):  # it is gone, and the thread that receives from it says so
                under_way += [self._group.send([part], peer, TAG) for part in (size, body)]
        is_sent.set()
        for work in under_way:
            with suppress(RuntimeError):
                work.wait(FOREVER)

    def _receive_all(self, peer: int) -> None:
        def receive(count: int, dtype: torch.dtype) -> Tensor:
            memory = torch.empty(count, dtype=dtype, device="cpu")
            self._group.recv([memory], peer, TAG).wait(FOREVER)  # for those who wait to say what is too long
            return memory

        message = VALUE
        while message[:1] in (VALUE, LEFT):
            try:
                size = int(receive(1, torch.int64))
                if not 0 < size <= LARGEST_MESSAGE_BYTES:
                    raise RuntimeError(f"a message of {size} bytes")
                message = receive(size, torch.uint8).numpy().tobytes()
            except RuntimeError:
                message = b""
            if message[:1] not in (VALUE, LEFT):
                self._listens.discard(peer)
            self.received.put((peer, message))

    def _hang_up(self) -> None:
        """Has gloo end the connections on which threads wait, as after a timeout."""
        for peer in self.peers:
            with suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, TAG).wait(timedelta(milliseconds=1))
        for thread in self._threads:
            thread.join(FAREWELL_SECONDS)


class Behind(Exception):  # noqa: N818  # nothing is wrong
    """The others have come together anew."""


class Rendezvous(Communicator, AbstractContextManager["Rendezvous"]):
    """A communicator of the processes that build one pipe; `with` it, whoever fails inside tells the others.

    They raise a RemoteError of it wherever they wait. Before `greet` it speaks of the whole world.

    Each process counts those it knows of; who has missed some learns it from the others, and greets them again with
    their number. So what a failed one has left is known, and thrown away.
    """

    def __init__(self) -> None:
        self.hosts: list[str] = []  # of each process of the world, once all have greeted
        self.tls: Identity | None = None
        self.phase = COMING  # what this process does now, in words
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._members: Sequence[int] = range(self.size)
        self._timeout = timeout_of_world()
        self._began = time.monotonic()
        self._group = gloo_group()
        self._channel = _channels.get(self._group) or _channels.setdefault(self._group, WorldChannel(self._group))
        self._has_ended = False
        self._begin(_attempts.get(self._group, 0) + 1)

    def _begin(self, attempt: int) -> None:
        self._attempt = _attempts[self._group] = attempt
        self._messages: dict[int, deque[bytes]] = {peer: deque() for peer in self._channel.peers}
        self._failures: list[Report] = []
        self._left: set[int] = set()  # who waited here for others in vain
        self._channel.listen(*self._channel.peers)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            if isinstance(error, OSError) and error.errno in LIMITS:
                may = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                error.add_note(
                    f"this process may have {may} files and sockets open, and connections to other processes need "
                    f"some: allow more where it is started, as by `ulimit -n {max(4096, 4 * may)}`"
                )
            if not self._has_ended:
                with suppress(RemoteError, Behind):
                    self.check()  # for the number of those who wait
                has_waited = self.phase == COMING and isinstance(error, RemoteError) and error.received
                self._send(LEFT if has_waited else FAILURE, Report.of(error, 0, self.rank, self.phase).write())
            self._channel.close()

    def greet(self, position: Position, value: Any = None) -> list[Any]:
        """Begins: gathers a value from each process of the world, by its number there; all run the same versions."""
        installed = ", ".join(f"{name} {version}" for name, version in versions().items())
        self.tls = identity()
        while True:
            with suppress(Behind):
                told = {"host": host_name(), "value": value, "tls": self.tls.authority if self.tls else ""}
                gathered = agree(self, told, same={"what is installed": installed})
                self.exchange(b"")  # what came may be of who has left since: now all know that all are here
                break
        self.rank, self.size, self._members = position.rank, len(position.members), position.members
        self.hosts = [remote["host"] for remote in gathered]
        check_authorities([remote["tls"] for remote in gathered])
        self.phase = SETTLING
        return [remote["value"] for remote in gathered]

    def close(self) -> None:
        """Ends it, once all have come to its end."""
        self._has_ended = True
        self.exchange(b"", kind=LAST)
        self._channel.close(self._timeout)

    def exchange(self, message: bytes, /, *, kind: bytes = VALUE) -> list[bytes]:
        self._send(kind, message)
        until, warns_at = time.monotonic() + self._timeout, time.monotonic() + LONG_WAIT_SECONDS
        while missing := [peer for peer, messages in self._messages.items() if not messages]:
            if self._take(min(until, warns_at) - time.monotonic()):
                continue
            missing = [peer for peer in missing if peer not in self._left] or missing
            if time.monotonic() >= until:
                limit = f"{self._timeout:g} s, the timeout of the process group"
                raise received(self._silent(missing, limit), self._number(missing[0]))
            logger.warning(self._silent(missing, f"{LONG_WAIT_SECONDS:g} s"))
            warns_at = math.inf
        gathered = {peer: messages.popleft() for peer, messages in self._messages.items()}
        return [gathered.get(member, message) for member in self._members]

    def _send(self, kind: bytes, message: bytes) -> None:
        self._channel.send(kind + self._attempt.to_bytes(ATTEMPT_BYTES) + message)

    def check(self, seconds: float = 0.0) -> None:
        """Raises if another process has failed, or does so in so many seconds."""
        until = time.monotonic() + seconds
        while self._take(until - time.monotonic()):
            pass

    def _take(self, seconds: float) -> bool:
        """Takes the next message, if it comes in so many seconds; whether it did.

        The first failure is raised: as a process reports it itself, if one soon does; else it names who is gone.
        """
        try:
            peer, message = self._channel.received.get(timeout=max(seconds, 0.0))
        except Empty:
            return False
        kind, body = message[:1], message[1 + ATTEMPT_BYTES :]
        attempt = int.from_bytes(message[1 : 1 + ATTEMPT_BYTES]) if message else self._attempt
        if self.phase == COMING and message:
            self._channel.listen(peer)  # after a failure, too: perhaps that was before this process came
        if attempt < self._attempt:
            return True
        if attempt > self._attempt and self.phase == COMING:  # what this process waits in is over
            self._begin(attempt)
            self._channel.received.put((peer, message))
            raise Behind
        if attempt == self._attempt and kind in (VALUE, LAST):
            self._messages[peer].append(body)
        elif kind == LEFT and self.phase == COMING:
            self._messages[peer].clear()
            self._left.add(peer)
        else:
            self._failures.append(self._failure(self._number(peer), body if kind == FAILURE else b""))
            if len(self._failures) == 1:
                self.check(BETTER_REASON_SECONDS)
                raise max(self._failures, key=lambda report: bool(report.type_name)).error()
        return True

    def _failure(self, peer: int, message: bytes) -> Report:
        if message:
            with reading("a report", peer):
                return Report.read(message)
        text = f"rank {peer} is gone; it ended {self.phase}"
        if self.phase == COMING and time.monotonic() - self._began > SILENT_SECONDS:  # gloo reports both alike
            text += ". Or it lives, and a collective that it waits in timed out: is GPipe(...) called on every rank?"
        return Report(0, peer, "", text)

    def _silent(self, peers: Sequence[int], seconds: str) -> str:
        silent = f"said nothing for {seconds}; last known: {self.phase.removeprefix('while ')}"
        return "\n".join(f"rank {self._number(peer)} {silent}" for peer in peers)

    def _number(self, member: int) -> int:
        return self._members.index(member) if member in self._members else member


class Address(NamedTuple):
    """Where a process listens, a folder for those of its host, and a number that is drawn."""

    folder: str
    host: str
    port: int
    drawn: str


def token_of(addresses: Sequence[Address]) -> str:
    """What those know who were given the addresses of all."""
    return hashlib.sha256(repr(addresses).encode()).hexdigest()[:32]


def hello(token: str, rank: int, stream: str) -> bytes:
    """What who connects has to say: who it is, and for which stream."""
    return f"{token} {rank} {stream}".ljust(HELLO_BYTES).encode()


def connect(
    rendezvous: "Rendezvous | Meeting", position: Position, groups: NcclGroups | None, silence: float | None = None
) -> Endpoint:
    """Connects this process with the others of its pipe, which do so at the same time; ends the rendezvous."""
    hosts, tls = [rendezvous.hosts[member] for member in position.members], rendezvous.tls
    local = {peer for peer, host in enumerate(hosts) if host == hosts[position.rank]}
    silence = min(position.timeout, silence or LONGEST_SILENCE)
    beyond = BY_TLS if tls else BETWEEN_HOSTS
    streams = {peer: STREAMS if peer in local else beyond for peer in range(len(hosts))}
    earlier, later = (
        [(peer, stream) for peer in peers for stream in streams[peer]]
        for peers in (range(position.rank), range(position.rank + 1, len(hosts)))
    )
    with ExitStack() as on_failure, listening(crosses_hosts=len(local) < len(hosts)) as listener:
        addresses = [Address(*remote) for remote in agree(rendezvous, listener.address)]
        token = token_of(addresses)
        shared: dict[int, Memory] = {}
        sockets: dict[tuple[int, str], socket.socket] = {}
        try:
            for peer in local - {position.rank}:
                shared[peer] = Status.memory_in(addresses[peer].folder)
            for peer, stream in earlier:
                said = hello(token, position.rank, stream)
                end = dial(addresses[peer], said, silence, local=peer in local, tls=tls)
                sockets[peer, stream] = on_failure.enter_context(end)
        except OSError as error:
            if error.errno not in LIMITS:  # it soon says why, or is gone
                rendezvous.check(0.0 if altered(error) else REPORT_SECONDS)
                raise received(f"rank {peer} cannot be reached {LINKING}: {error}", peer) from error
            raise
        sockets |= listener.accept(later, token, min(LINK_SECONDS, position.timeout), rendezvous.check, tls)
        for (_, stream), end in sockets.items():
            on_failure.enter_context(end)
            _keep_alive(end, stream, silence)
        connections = {}
        for peer in sorted(streams.keys() - {position.rank}):
            ends = [sockets[peer, stream] for stream in streams[peer] if stream != QUESTIONS]
            if streams[peer] == BY_TLS and peer < position.rank:  # who dialled writes to the first
                ends.reverse()
            connections[peer] = (Connection if peer in local else TcpConnection)(*ends)
            on_failure.callback(connections[peer].close)
            connections[peer].host = f"host {hosts[peer].partition(' ')[0]}"
        asked = {peer: end for (peer, stream), end in sockets.items() if stream == QUESTIONS}
        questions = Questions(asked, listener.status)
        on_failure.callback(questions.close)
        endpoint = Endpoint(position.rank, connections, position.timeout, listener.status, shared, groups, questions)
        rendezvous.close()
        on_failure.pop_all()
        return endpoint


def dial(address: Address, said: bytes, seconds: float, *, local: bool, tls: Identity | None = None) -> socket.socket:
    """Connects to a listener and says who this is; by TLS once each knows the other, and it has been let in."""
    with ExitStack() as on_failure:
        end = on_failure.enter_context(socket.socket(socket.AF_UNIX if local else family(address.host)))
        end.settimeout(seconds)
        end.connect(f"{address.folder}/listener" if local else (address.host, address.port))
        if tls is None or local:
            end.sendall(said)
        else:
            end = on_failure.enter_context(tls.client.wrap_socket(end))
            with suppress(OSError):  # who has hung up by now has said why
                end.sendall(said)
            if end.recv(1) != WELCOME:
                raise ConnectionError("it takes this process for a stranger")
        end.settimeout(None)
        on_failure.pop_all()
        return end


@contextmanager
def listening(*, crosses_hosts: bool) -> Iterator["Listener"]:
    """While others can connect to this process: by a path within the host, by an address only if there are others."""
    host, port = own_host() if crosses_hosts else "", 0
    os.close(os.open(os.devnull, os.O_RDONLY))  # raises where no file can be opened: tempfile would not say so
    with ExitStack() as opened:
        try:
            folder, status, local = _show(opened, MEMORY)
        except OSError:  # it is full, not to be written or not there
            folder, status, local = _show(opened, tempfile.gettempdir())
        sockets = [local]
        if crosses_hosts:
            sockets.append(opened.enter_context(listen(host)))
            port = sockets[1].getsockname()[1]
        yield Listener(Address(folder, host, port, secrets.token_hex(16)), sockets, status)


def _show(opened: ExitStack, parent: str) -> tuple[str, Status, socket.socket]:
    """Makes a folder for others of this host, locked for life; removes those that killed processes left."""
    for left in Path(parent).glob("gpipe-[0-9]*-*"):
        with suppress(OSError), ExitStack() as closing:
            closing.callback(os.close, handle := os.open(left, os.O_RDONLY | os.O_NOFOLLOW))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if set(os.listdir(handle)) in ({"status"}, {"status", "listener"}):  # an empty one is not locked yet
                shutil.rmtree(left)
    name = f"gpipe-{os.getpid()}-"  # of mode 0700
    folder = opened.enter_context(tempfile.TemporaryDirectory("", name, parent, ignore_cleanup_errors=True))
    opened.callback(os.close, handle := os.open(folder, os.O_RDONLY))
    fcntl.flock(handle, fcntl.LOCK_EX)
    status, listener = Status.shown_in(folder), opened.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(f"{folder}/listener")
    listener.listen(1024)
    return folder, status, listener


class Listener(NamedTuple):
    """Where a process can be reached, the sockets that others come to, and what they see."""

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
        """Takes these connections, of peer and stream, unless `check` raises; keeps no stranger, waits for none."""
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
                    raise TimeoutError(f"ranks {ranks} did not connect within {seconds:g} s")
                for key, _ in selector.select(POLL_SECONDS):
                    end: Any = key.fileobj
                    if key.data is None:
                        with suppress(ssl.SSLError, ConnectionError):  # it has hung up
                            end = accepted.enter_context(_let_in(end, tls))
                            selector.register(end, selectors.EVENT_READ, bytearray())
                    elif _has_said_hello(end, key.data):
                        selector.unregister(end)
                        said = next((said for said in missing if hmac.compare_digest(said, key.data)), None)
                        if said is None:
                            end.close()
                        else:
                            found[missing.pop(said)] = end
                            if isinstance(end, ssl.SSLSocket):
                                end.send(WELCOME)
            for key in selector.get_map().values():
                if key.data is not None:  # a stranger that has not said all
                    key.fileobj.close()  # type: ignore[union-attr]  # a socket
            accepted.pop_all()
        for end in found.values():
            end.setblocking(True)
        return found


def _let_in(listener: socket.socket, tls: Identity | None) -> socket.socket:
    end = listener.accept()[0]
    end.setblocking(False)
    if tls is None or end.family == socket.AF_UNIX:
        return end
    return tls.server.wrap_socket(end, server_side=True, do_handshake_on_connect=False)


def _has_said_hello(connection: socket.socket, said: bytearray) -> bool:
    """Takes what has come of a hello, by TLS behind a handshake; whether that is all, or all that comes."""
    try:
        more = connection.recv(HELLO_BYTES - len(said))
    except BLOCKED:
        return False
    except OSError:
        return True
    said += more
    return not more or len(said) == HELLO_BYTES


def _keep_alive(connection: socket.socket, stream: str, silence: float) -> None:
    """Has a connection between hosts end after so many seconds without an answer.

    Of those of tensors this holds while they are idle: Linux takes a receiver that is busy, and has no room, for one
    that does not answer. Where the wire is cut beneath them the other streams, always with room, end in time.
    """
    if connection.family != socket.AF_UNIX:
        limits = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": max(round(silence), 1)}
        if stream in ("control", QUESTIONS):
            limits["TCP_USER_TIMEOUT"] = round(silence * 1000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in limits.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
