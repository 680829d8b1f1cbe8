"""While a pipe is built: the processes come together and settle what it is, and none waits for one that has failed.

All go through the same phases and exchange something at the end of each. So who is gone, or sends nothing, is in the
phase in which the others wait for it.
"""

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.distributed.agree import Communicator, agree, versions
from gpipe.distributed.failures import LONG_WAIT_SECONDS, SILENT_SECONDS, Report
from gpipe.distributed.frames import reading
from gpipe.distributed.mesh import Position, host_name, timeout_of_world
from gpipe.errors import received

logger = logging.getLogger("gpipe")

COMING = "before it came to build the pipe, or as it began"
SETTLING = "while it settled what the pipe is made of"
BUILDING = "while it built its layers"
LINKING = "while the processes linked up"
BETTER_REASON_SECONDS = 0.2  # from the first bad news on, in which a better reason may come

VALUE, LAST, FAILURE = b"=", b".", b"!"  # the first byte of a message; nothing follows the last, or a failure
FIRST_TAG = 0x67700000  # of messages; whoever else sends through this group counts from 0
FOREVER = timedelta(days=365)
LARGEST_MESSAGE_BYTES = 2**26
FAREWELL_SECONDS = 1.0  # that a process which fails waits for the others to take that in

_opened: "WeakKeyDictionary[dist.ProcessGroup, count[int]]" = WeakKeyDictionary()  # none reads another's messages
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

    A thread that waits in gloo while the interpreter ends would take the process down with it, should the other end
    be gone just then. So whoever leaves early waits a little for the others, and hangs up at the end.
    """

    def __init__(self) -> None:
        self.received: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self.peers = [peer for peer in range(dist.get_world_size()) if peer != dist.get_rank()]
        self._group = gloo_group()
        self._tag = FIRST_TAG + next(_opened.setdefault(self._group, count())) % 2**20
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._threads = [
            threading.Thread(target=self._receive_all, args=[peer], name=f"gpipe receives {peer}", daemon=True)
            for peer in self.peers
        ]
        atexit.register(self._hang_up)
        for thread in self._threads:
            thread.start()

    def send(self, message: bytes) -> None:
        """Sends a message to all others, and waits for nobody."""
        size = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for peer in self.peers:
            with suppress(RuntimeError):  # it is gone, and the thread that receives from it says so
                for sent in (size, body):
                    self._under_way.append((self._group.send([sent], peer, self._tag), sent))

    def close(self, seconds: float = FAREWELL_SECONDS) -> None:
        """Waits until all have sent and received all; threads go on with it, for those who come late."""
        until = time.monotonic() + seconds
        self._threads.append(threading.Thread(target=self._await_sent, name="gpipe sends", daemon=True))
        self._threads[-1].start()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            atexit.unregister(self._hang_up)

    def _receive_all(self, peer: int) -> None:
        def receive(count: int, dtype: torch.dtype) -> Tensor:
            memory = torch.empty(count, dtype=dtype, device="cpu")
            self._group.recv([memory], peer, self._tag).wait(FOREVER)  # for those who wait to say what is too long
            return memory

        message = VALUE
        try:
            while message[:1] == VALUE:
                size = int(receive(1, torch.int64))
                if not 0 < size <= LARGEST_MESSAGE_BYTES:
                    raise RuntimeError(f"a message of {size} bytes")
                message = receive(size, torch.uint8).numpy().tobytes()
                self.received.put((peer, message))
        except RuntimeError:
            self.received.put((peer, b""))

    def _await_sent(self) -> None:
        for work, _ in self._under_way:
            with suppress(RuntimeError):
                work.wait(FOREVER)

    def _hang_up(self) -> None:
        """Has gloo end the connections on which threads wait, as after a timeout."""
        for peer in self.peers:
            with suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, self._tag).wait(timedelta(milliseconds=1))
        for thread in self._threads:
            thread.join(FAREWELL_SECONDS)


class Rendezvous(Communicator):
    """A communicator of the processes that build one pipe; `with` it, whoever fails inside tells the others.

    They raise a RemoteError of it wherever they wait. Before `greet` it speaks of the whole world.
    """

    def __init__(self) -> None:
        self.hosts: list[str] = []  # of each process of the world, once all have greeted
        self.phase = COMING  # what this process does now, in words
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._members: Sequence[int] = range(self.size)
        self._timeout = timeout_of_world()
        self._began = time.monotonic()
        self._channel = WorldChannel()
        self._messages: dict[int, deque[bytes]] = {peer: deque() for peer in self._channel.peers}
        self._failures: list[Report] = []
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            if not self._has_ended:
                self._channel.send(FAILURE + Report.of(error, 0, self.rank, self.phase).write())
            self._channel.close()

    def greet(self, position: Position, value: Any = None) -> list[Any]:
        """Begins: gathers a value from each process of the world, by its number there; all run the same versions."""
        installed = ", ".join(f"{name} {version}" for name, version in versions().items())
        gathered = agree(self, {"host": host_name(), "value": value}, same={"what is installed": installed})
        self.rank, self.size, self._members = position.rank, len(position.members), position.members
        self.hosts = [remote["host"] for remote in gathered]
        self.phase = SETTLING
        return [remote["value"] for remote in gathered]

    def close(self) -> None:
        """Ends it, once all have come to its end."""
        self._has_ended = True
        self.exchange(b"", kind=LAST)
        self._channel.close(self._timeout)

    def exchange(self, message: bytes, /, *, kind: bytes = VALUE) -> list[bytes]:
        """Sends a message to all processes of the pipe, and gathers those of all, by rank."""
        self._channel.send(kind + message)
        until, warns_at = time.monotonic() + self._timeout, time.monotonic() + LONG_WAIT_SECONDS
        while missing := [peer for peer, messages in self._messages.items() if not messages]:
            if self._take(min(until, warns_at) - time.monotonic()):
                continue
            if time.monotonic() >= until:
                limit = f"{self._timeout:g} s, the timeout of the process group"
                raise received(self._silent(missing, limit), self._number(missing[0]))
            logger.warning(self._silent(missing, f"{LONG_WAIT_SECONDS:g} s"))
            warns_at = math.inf
        gathered = {peer: messages.popleft() for peer, messages in self._messages.items()}
        return [gathered.get(member, message) for member in self._members]

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
        if message[:1] in (VALUE, LAST):
            self._messages[peer].append(message[1:])
            return True
        self._failures.append(self._failure(self._number(peer), message[1:]))
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
        last = self.phase.removeprefix("while ")
        return "\n".join(
            f"rank {self._number(peer)} said nothing for {seconds}; last known: {last}" for peer in peers
        )

    def _number(self, member: int) -> int:
        """The rank of a process of the world in the pipe, if it is known there."""
        return self._members.index(member) if member in self._members else member
