"""How the processes of the world talk before they are linked: nobody waits for one that is gone.

gloo tells of a death at once, but only to who waits for a message from that very process. So a thread for each other
process waits for what it tells next, as long as the meeting lasts: whoever waits for all hears the first that comes,
be it a record, or that a process is gone. A process has told all when it says that a record is its last.
"""

import atexit
import threading
import time
from contextlib import suppress
from datetime import timedelta
from itertools import count
from queue import SimpleQueue
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

FIRST_TAG = 0x67700000  # of messages; whoever else sends through this group counts from 0
FOREVER = timedelta(days=365)
LARGEST = 2**26  # bytes of a record
UNTIL_TOLD = 1.0  # seconds that a process which fails waits for the others to take that in

Heard: TypeAlias = "tuple[int, bytes | None]"
"""Who told what; None: it is gone."""

_meetings: "WeakKeyDictionary[dist.ProcessGroup, count[int]]" = WeakKeyDictionary()  # so that none hears another's


def meet(device: torch.device) -> "GlooMeeting | CollectiveMeeting":
    """Opens a meeting, whose `heard` gets what is told as soon as it is here; all processes of the world do."""
    return GlooMeeting() if "cpu:gloo" in str(dist.get_backend_config()) else CollectiveMeeting(device)


class GlooMeeting:
    """A meeting through gloo, in which each process is heard by itself.

    A thread that waits in gloo while the interpreter ends would take the process down with it, should the other end
    be gone just then. So whoever leaves early waits a little for the others, and hangs up at the end.
    """

    def __init__(self) -> None:
        self.heard: SimpleQueue[Heard] = SimpleQueue()
        group, own = dist.group.WORLD, dist.get_rank()
        assert group is not None
        self._group = group
        self._tag = FIRST_TAG + next(_meetings.setdefault(group, count())) % 2**20
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._listeners = {
            peer: threading.Thread(target=self._listen, args=[peer], name=f"gpipe hears {peer}", daemon=True)
            for peer in range(dist.get_world_size())
            if peer != own
        }
        self._senders: list[threading.Thread] = []
        self._has_said_all = False
        atexit.register(self._hang_up)
        for listener in self._listeners.values():
            listener.start()

    def tell(self, record: bytes, *, last: bool) -> None:
        """Tells all others, and waits for nobody; who has said its last is listened to no more."""
        if self._has_said_all:
            return
        self._has_said_all = last
        head = torch.tensor([len(record), not last], dtype=torch.int64, device="cpu")
        body = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        for peer in self._listeners:
            with suppress(RuntimeError):  # it is gone, and the thread that hears it says so
                for sent in (head, body):
                    self._under_way.append((self._group.send([sent], peer, self._tag), sent))

    def leave(self, record: bytes, *, known: bool) -> None:
        """Tells all others why this process leaves: it failed, or, if that is `known` to all, another did."""
        self.tell(record, last=True)
        self.part(UNTIL_TOLD)

    def part(self, seconds: float) -> None:
        """Waits until all have told and been told all; threads go on with it, for those who come late."""
        until = time.monotonic() + seconds
        self._senders.append(threading.Thread(target=self._await, name="gpipe is heard", daemon=True))
        self._senders[-1].start()
        for thread in (*self._senders, *self._listeners.values()):
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in (*self._senders, *self._listeners.values())):
            atexit.unregister(self._hang_up)

    def _listen(self, peer: int) -> None:
        try:
            goes_on = True
            while goes_on:
                size, goes_on = self._receive(torch.empty(2, dtype=torch.int64, device="cpu"), peer).tolist()
                if not 0 < size <= LARGEST:
                    raise RuntimeError(f"a record of {size} bytes")
                record = self._receive(torch.empty(size, dtype=torch.uint8, device="cpu"), peer)
                self.heard.put((peer, record.numpy().tobytes()))
        except RuntimeError:
            self.heard.put((peer, None))

    def _receive(self, room: Tensor, peer: int) -> Tensor:
        self._group.recv([room], peer, self._tag).wait(FOREVER)  # how long is too long is for those to say who wait
        return room

    def _await(self) -> None:
        for work, _ in self._under_way:
            with suppress(RuntimeError):
                work.wait(FOREVER)

    def _hang_up(self) -> None:
        """Has gloo end the connections on which threads still wait, as it does after a timeout."""
        unheard = any(sender.is_alive() for sender in self._senders)
        for peer, listener in self._listeners.items():
            if unheard or listener.is_alive():
                with suppress(RuntimeError):
                    self._group.recv([torch.empty(1)], peer, self._tag).wait(timedelta(milliseconds=1))
        for thread in (*self._senders, *self._listeners.values()):
            thread.join(UNTIL_TOLD)


class CollectiveMeeting:
    """A meeting in which all can only speak at once: the world has no gloo."""

    def __init__(self, device: torch.device) -> None:
        self.heard: SimpleQueue[Heard] = SimpleQueue()
        self._device = device

    def tell(self, record: bytes, *, last: bool) -> None:
        """Tells all others, and waits for all."""
        for peer, theirs in enumerate(tell_all(record, self._device)):
            if peer != dist.get_rank():
                self.heard.put((peer, theirs))

    def leave(self, record: bytes, *, known: bool) -> None:
        """Tells all others why this process leaves, if they do not leave too."""
        if not known:
            self.tell(record, last=True)

    def part(self, seconds: float) -> None:
        """All have been told."""


def tell_all(told: bytes, device: torch.device) -> list[bytes]:
    """Gives what each process of the world told, by rank; no pickle. All call it at the same time."""
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(told)], device=device))
    room = min(max(int(size) for size in sizes), LARGEST) or 1
    own = torch.frombuffer(bytearray(told.ljust(room, b"\0")), dtype=torch.uint8).to(device)
    every = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(every, own)
    return [bytes(row[: int(size)].tolist()) for row, size in zip(every, sizes, strict=True)]
