"""How the processes of a pipe find each other: records exchanged through torch.distributed, then a link a pair.

Nothing listens but for this moment: within a host at a socket in a folder that only its user can enter, between hosts
at the address by which the others are reached, and only to who knows the number that was exchanged.
"""

import hmac
import json
import os
import secrets
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from gpipe.run.links import Link
from gpipe.run.remote import RemoteLink

HELLO = 48  # bytes: a token of 32, a rank, one of the streams
STREAMS = ("messages", "news")
LONGEST_FOLDER = 70  # characters: the path of a socket may have about 100
PATIENCE = 60.0  # seconds for all to connect, once all have said where they are


@dataclass(frozen=True)
class Door:
    """Where a process can be reached, and the number that its visitors must know."""

    path: str
    address: str
    port: int
    token: str


def tell_all(told: bytes, device: torch.device) -> list[bytes]:
    """Gives what each process of the world told, by rank; no pickle. All call it at the same time."""
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(told)], device=device))
    room = max(int(size) for size in sizes) or 1
    own = torch.frombuffer(bytearray(told.ljust(room, b"\0")), dtype=torch.uint8).to(device)
    every = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(every, own)
    return [bytes(row[: int(size)].tolist()) for row, size in zip(every, sizes, strict=True)]


def connect(members: Sequence[int], device: torch.device, silence: float) -> dict[int, Link]:
    """Links this process with the others of `members`, numbers in the world; by their place there.

    All processes of the world call it at the same time. A host that says nothing for `silence` seconds is gone.

    Raises:
        TimeoutError: Some did not connect; they are named.
    """
    rank = members.index(dist.get_rank())
    here = {"host": _host(), "versions": _versions()}
    told = [json.loads(record) for record in tell_all(json.dumps(here).encode(), device)]
    theirs = [told[member] for member in members]
    _refuse_other_versions([record["versions"] for record in theirs])
    hosts = [record["host"] for record in theirs]
    with _Listening(crosses_hosts=len(set(hosts)) > 1) as own:
        doors = [Door(**json.loads(door)) for door in tell_all(json.dumps(asdict(own.door)).encode(), device)]
        pairs = {
            peer: _call(doors[members[peer]], rank, silence, local=hosts[peer] == hosts[rank]) for peer in range(rank)
        }
        pairs |= own.welcome(range(rank + 1, len(members)), silence)
    return {peer: (Link if hosts[peer] == hosts[rank] else RemoteLink)(*pairs[peer]) for peer in sorted(pairs)}


def _refuse_other_versions(versions: Sequence[str]) -> None:
    first = {version: versions.index(version) for version in versions}
    if len(first) > 1:
        found = ", ".join(f"{version} (rank {rank})" for version, rank in first.items())
        raise ValueError(f"the processes run different versions: {found}; install the same everywhere")


class _Listening:
    """A process while others can connect to it: by a path within the host, by an address only if there are others."""

    def __init__(self, *, crosses_hosts: bool) -> None:
        address, port = _own_address() if crosses_hosts else "", 0
        long = len(tempfile.gettempdir()) > LONGEST_FOLDER
        self._folder = tempfile.mkdtemp(prefix="gpipe-", dir="/tmp" if long else None)  # mode 0700
        self._listeners = [socket.socket(socket.AF_UNIX)]
        self._listeners[0].bind(str(Path(self._folder) / "door"))
        if crosses_hosts:
            self._listeners.append(socket.socket(socket.AF_INET))
            self._listeners[1].bind((address, 0))
            address, port = self._listeners[1].getsockname()
        for listener in self._listeners:
            listener.listen(1024)
        self.door = Door(self._listeners[0].getsockname(), address, port, secrets.token_hex(16))

    def __enter__(self) -> "_Listening":
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def welcome(self, peers: range, silence: float) -> dict[int, list[socket.socket]]:
        """Takes the connections of these peers: of each the stream, then the news."""
        found: dict[int, dict[str, socket.socket]] = {peer: {} for peer in peers}
        until = time.monotonic() + PATIENCE
        with ExitStack() as visitors, selectors.DefaultSelector() as doors:
            for listener in self._listeners:
                doors.register(listener, selectors.EVENT_READ)
            while missing := [peer for peer, two in found.items() if len(two) < len(STREAMS)]:
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"ranks {missing} did not connect within {PATIENCE:g} s")
                for key, _ in doors.select(left):
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
        if len(visitor.said) == HELLO and hmac.compare_digest(token.encode(), self.door.token.encode()):
            visitor.connection.setblocking(True)
            found[int(rank)][which] = _prepared(visitor.connection, silence)
            visitor.is_ours = True
        visitor.leave()


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
            heard = self.connection.recv(HELLO - len(self.said))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.said += heard
        return bool(heard) and len(self.said) < HELLO

    def leave(self) -> None:
        """Shuts it out, unless it is one of ours."""
        if not self.is_ours:
            self.connection.close()


def _call(door: Door, rank: int, silence: float, *, local: bool) -> list[socket.socket]:
    made = []
    for which in STREAMS:
        if local:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(door.path)
        else:
            connection = socket.create_connection((door.address, door.port), timeout=PATIENCE)
            connection.settimeout(None)
        connection.sendall(f"{door.token} {rank} {which}".ljust(HELLO).encode())
        made.append(_prepared(connection, silence))
    return made


def _prepared(connection: socket.socket, silence: float) -> socket.socket:
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_USER_TIMEOUT", round(silence * 1000))):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _host() -> str:
    """What is the same for processes that share memory and a network."""
    named: list[Callable[[], str]] = [
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/net"),
        lambda: os.readlink("/proc/self/ns/mnt"),
    ]
    parts = [socket.gethostname()]
    for name in named:
        try:
            parts.append(name())
        except OSError:
            continue
    return " ".join([*parts, str(os.getuid())])


def _own_address() -> str:
    """The address of this host by which the others of the world reach it.

    Raises:
        ValueError: The first host is named by an address of its own alone.
    """
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


def _versions() -> str:
    return f"gpipe {_version('gpipe')}, torch {_version('torch')}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
