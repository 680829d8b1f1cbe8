"""Lets processes build a pipe together, and reports the failure of one process to all other processes.

All processes complete the same phases, and exchange a message at the end of each phase. If a process ends or sends no
message, errors can therefore name its phase. The last phase connects the processes (linking.py).
"""

import atexit
import errno
import logging
import math
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.distributed.codec import decoding
from gpipe.distributed.communicator import Communicator, all_gather_checked, versions
from gpipe.distributed.failures import LONG_WAIT_SECONDS, SILENT_SECONDS, Report
from gpipe.distributed.mesh import Position, host_name, timeout_of_world
from gpipe.distributed.tls import Identity, check_authorities, identity
from gpipe.errors import RemoteError, received_error

logger = logging.getLogger("gpipe")

STARTING = "before it called GPipe(...), or at the beginning of that call"
PLANNING = "while it read the model and made the plan"
BUILDING = "while it built its layers"
LINKING = "while the processes connected"
BETTER_REASON_SECONDS = 0.2  # after the first report of a failure, to wait for one with a better reason

VALUE, LEFT, LAST, FAILURE = b"=", b"-", b".", b"!"  # the first byte of a message
ATTEMPT_BYTES = 8  # the next bytes: the number of the rendezvous of this group
TAG = 0x67700000  # of messages; does not collide with other users of the group, whose tags count from 0
FOREVER = timedelta(days=365)
LARGEST_MESSAGE_BYTES = 2**26
FAREWELL_SECONDS = 1.0  # how long a failing process waits for the others to receive its report
DESCRIPTOR_LIMITS = (errno.EMFILE, errno.ENFILE)

_attempts: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()  # the last known number of each group
_channels: "dict[dist.ProcessGroup, WorldChannel]" = {}  # channels with threads that may still receive
_gloo: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()


def gloo_group() -> dist.ProcessGroup:
    """Returns the default process group if it uses gloo, otherwise a new gloo group of all processes.

    All processes must call this function.
    """
    world = dist.group.WORLD
    assert world is not None
    if "cpu:gloo" in str(dist.get_backend_config()):
        return world
    if world not in _gloo:
        _gloo[world] = dist.new_group(backend="gloo")
    return _gloo[world]


class WorldChannel:
    """Sends messages to all other processes, and receives messages from all other processes in threads.

    gloo reports the end of a process immediately, but only to a receiver that waits for a message from that process.
    torch's store does not report the end of a process. Therefore one thread per peer waits for the next message of
    the peer during the rendezvous.

    If a rendezvous fails, the next rendezvous uses the same threads, and skips messages of the failed rendezvous.

    If the interpreter exits while a thread waits in gloo, and the peer ends at the same time, the process crashes. A
    process that fails early therefore waits for a short time for the other processes, and ends the connections at
    exit.

    Attributes:
        received: Pairs of a sender and a message. An empty message reports the end of the sender.
        peers: The ranks of the other processes in the default process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.received: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self.peers = [peer for peer in range(dist.get_world_size()) if peer != dist.get_rank()]
        self._group = group
        self._listens: set[int] = set()  # peers for which a thread runs
        self._threads: list[threading.Thread] = []
        self._send_lock = threading.Lock()
        atexit.register(self._disconnect)

    def listen(self, *peers: int) -> None:
        """Receives messages of these peers in threads, until the end of the rendezvous."""
        for peer in {*peers} - self._listens:
            self._listens.add(peer)
            self._start(f"gpipe receives {peer}", self._receive_all, peer)

    def send(self, message: bytes) -> None:
        """Sends a message to all peers without waiting for receivers. An interrupt cannot split the message."""
        is_sent = threading.Event()
        self._start("gpipe sends", self._send_all, message, is_sent)
        is_sent.wait()

    def close(self, seconds: float = FAREWELL_SECONDS) -> None:
        """Waits until all messages are sent and received. Threads of late peers continue after the timeout."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            _channels.pop(self._group, None)  # the user may destroy the group and create another one
            atexit.unregister(self._disconnect)

    def _start(self, name: str, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args, name=name, daemon=True))
        self._threads[-1].start()

    def _send_all(self, message: bytes, is_sent: threading.Event) -> None:
        size = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        in_flight: list[dist.Work] = []
        for peer in self.peers:
            with self._send_lock, suppress(RuntimeError):  # the peer has ended; the receiving thread reports it
                in_flight += [self._group.send([part], peer, TAG) for part in (size, body)]
        is_sent.set()
        for work in in_flight:
            with suppress(RuntimeError):
                work.wait(FOREVER)

    def _receive_all(self, peer: int) -> None:
        def receive(count: int, dtype: torch.dtype) -> Tensor:
            memory = torch.empty(count, dtype=dtype, device="cpu")
            self._group.recv([memory], peer, TAG).wait(FOREVER)  # the rendezvous applies the timeout
            return memory

        message = VALUE
        while message[:1] in (VALUE, LEFT):
            try:
                size = int(receive(1, torch.int64))
                if not 0 < size <= LARGEST_MESSAGE_BYTES:
                    raise RuntimeError(f"invalid message size {size}")
                message = receive(size, torch.uint8).numpy().tobytes()
            except RuntimeError:
                message = b""
            if message[:1] not in (VALUE, LEFT):
                self._listens.discard(peer)
            self.received.put((peer, message))

    def _disconnect(self) -> None:
        """Ends the gloo connections of waiting threads with a receive operation that times out."""
        for peer in self.peers:
            with suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, TAG).wait(timedelta(milliseconds=1))
        for thread in self._threads:
            thread.join(FAREWELL_SECONDS)


class RendezvousRestarted(Exception):  # noqa: N818  # not an error
    """Raised if the other processes have started a new rendezvous."""


class Rendezvous(Communicator, AbstractContextManager["Rendezvous"]):
    """A communicator of the processes that build one pipe.

    The context reports an exception to the other processes. They raise a RemoteError when they next wait.

    Each rendezvous has a number. A process that missed a rendezvous adopts the number of the other processes. With
    this number, processes recognize and drop messages of a failed rendezvous.

    Attributes:
        rank: The rank within the pipe. Before `greet`, the rank in the default process group.
        size: The number of processes.
        hosts: The host of each process in the default process group, after `greet`.
        tls: The TLS contexts, if TLS is configured.
        phase: A description of the current phase, for messages.
    """

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.tls: Identity | None = None
        self.phase = STARTING
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
        self._left: set[int] = set()  # peers that gave up waiting in this phase
        self._channel.listen(*self._channel.peers)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            if isinstance(error, OSError) and error.errno in DESCRIPTOR_LIMITS:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                error.add_note(
                    f"The limit of open files of this process is {limit}, and connections to other processes need "
                    f"some of them. Increase the limit before you start it: `ulimit -n {max(4096, 4 * limit)}`."
                )
            if not self._has_ended:
                with suppress(RemoteError, RendezvousRestarted):
                    self.check()  # adopts the number of processes that wait already
                has_waited = self.phase == STARTING and isinstance(error, RemoteError) and error.received
                self._send(LEFT if has_waited else FAILURE, Report.of(error, 0, self.rank, self.phase).write())
            self._channel.close()

    def greet(self, position: Position, value: Any = None) -> list[Any]:
        """Begins the rendezvous, and gathers a value from each process. The values are ordered by global rank.

        Raises:
            ValueError: If processes have different versions of gpipe or torch, or different TLS authorities.
        """
        installed = ", ".join(f"{name} {version}" for name, version in versions().items())
        self.tls = identity()
        while True:
            with suppress(RendezvousRestarted):
                about = {"host": host_name(), "value": value, "tls": self.tls.authority if self.tls else ""}
                gathered = all_gather_checked(self, about, same={"the installed version": installed})
                self.all_gather(b"")  # a sender may have left before the others came; now all are known to be here
                break
        self.rank, self.size, self._members = position.rank, len(position.members), position.members
        self.hosts = [remote["host"] for remote in gathered]
        check_authorities([remote["tls"] for remote in gathered])
        self.phase = PLANNING
        return [remote["value"] for remote in gathered]

    def close(self) -> None:
        """Waits until all processes have called `close`, and ends the rendezvous."""
        self._has_ended = True
        self.all_gather(b"", kind=LAST)
        self._channel.close(self._timeout)

    def all_gather(self, message: bytes, /, *, kind: bytes = VALUE) -> list[bytes]:
        self._send(kind, message)
        until, warns_at = time.monotonic() + self._timeout, time.monotonic() + LONG_WAIT_SECONDS
        while missing := [peer for peer, messages in self._messages.items() if not messages]:
            if self._take(min(until, warns_at) - time.monotonic()):
                continue
            missing = [peer for peer in missing if peer not in self._left] or missing
            if time.monotonic() >= until:
                limit = f"{self._timeout:g} s, the timeout of the process group"
                raise received_error(self._silent(missing, limit), self._rank_of(missing[0]))
            logger.warning(self._silent(missing, f"{LONG_WAIT_SECONDS:g} s") + "\n[long-wait]")
            warns_at = math.inf
        gathered = {peer: messages.popleft() for peer, messages in self._messages.items()}
        return [gathered.get(member, message) for member in self._members]

    def _send(self, kind: bytes, message: bytes) -> None:
        self._channel.send(kind + self._attempt.to_bytes(ATTEMPT_BYTES) + message)

    def check(self, seconds: float = 0.0) -> None:
        """Raises a RemoteError if another process has failed or fails within `seconds`."""
        until = time.monotonic() + seconds
        while self._take(until - time.monotonic()):
            pass

    def _take(self, seconds: float) -> bool:
        """Processes the next message. Returns whether one arrived within `seconds`.

        Raises:
            RemoteError: If a process failed or ended. If one process reported an error and a different process ended
                without a report, the reported error is raised.
            RendezvousRestarted: If the message belongs to a newer rendezvous.
        """
        try:
            peer, message = self._channel.received.get(timeout=max(seconds, 0.0))
        except Empty:
            return False
        kind, body = message[:1], message[1 + ATTEMPT_BYTES :]
        attempt = int.from_bytes(message[1 : 1 + ATTEMPT_BYTES]) if message else self._attempt
        if self.phase == STARTING and message:
            self._channel.listen(peer)  # even after a failure, which may belong to an earlier rendezvous
        if attempt < self._attempt:
            return True
        if attempt > self._attempt and self.phase == STARTING:
            self._begin(attempt)
            self._channel.received.put((peer, message))
            raise RendezvousRestarted
        if attempt == self._attempt and kind in (VALUE, LAST):
            self._messages[peer].append(body)
        elif kind == LEFT and self.phase == STARTING:
            self._messages[peer].clear()
            self._left.add(peer)
        else:
            self._failures.append(self._failure(self._rank_of(peer), body if kind == FAILURE else b""))
            if len(self._failures) == 1:
                self.check(BETTER_REASON_SECONDS)
                raise max(self._failures, key=lambda report: bool(report.type_name)).error()
        return True

    def _failure(self, peer: int, message: bytes) -> Report:
        if message:
            with decoding("a report", peer):
                return Report.read(message)
        text = f"rank {peer} is gone: it ended {self.phase}."
        if self.phase == STARTING and time.monotonic() - self._began > SILENT_SECONDS:  # gloo reports both alike
            text += " Or a collective timed out in which it waits: check that every rank calls GPipe(...)."
        return Report(0, peer, "", text)

    def _silent(self, peers: Sequence[int], seconds: str) -> str:
        return "\n".join(f"rank {self._rank_of(peer)}: no message for {seconds}, {self.phase}." for peer in peers)

    def _rank_of(self, member: int) -> int:
        return self._members.index(member) if member in self._members else member
