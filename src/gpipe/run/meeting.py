"""How the processes of the world talk before they are linked: nobody waits for one that is gone.

gloo tells of a death at once, but only to who waits for a message from that very process. So a thread for each other
process waits for what it tells next, as long as the meeting lasts: whoever waits for all hears the first that comes,
be it a record, or that a process is gone. A process has told all when it says that a record is its last.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from queue import SimpleQueue
from typing import Protocol, TypeAlias
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


class Meeting(Protocol):
    """What is told comes into `heard`, as soon as it is here."""

    heard: SimpleQueue[Heard]

    def tell(self, record: bytes, *, last: bool) -> None:
        """Tells all others, and waits for nobody."""

    def leave(self, record: bytes, *, known: bool) -> None:
        """Tells all others why this process leaves: it failed, or, if that is known to all, another did."""

    def part(self, seconds: float) -> None:
        """Waits until the others have been told all."""


def meet(device: torch.device) -> Meeting:
    """Opens a meeting; all processes of the world do, as often."""
    return Voices() if "cpu:gloo" in str(dist.get_backend_config()) else Choir(device)


class Voices:
    """A meeting through gloo, in which each process is heard by itself."""

    def __init__(self) -> None:
        self.heard: SimpleQueue[Heard] = SimpleQueue()
        group, own = dist.group.WORLD, dist.get_rank()
        assert group is not None
        self._tag = FIRST_TAG + next(_meetings.setdefault(group, count())) % 2**20
        self._others = [peer for peer in range(dist.get_world_size()) if peer != own]
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        for peer in self._others:
            given = (peer, self._tag, self.heard)
            threading.Thread(target=_listen, args=given, name=f"gpipe hears {peer}", daemon=True).start()

    def tell(self, record: bytes, *, last: bool) -> None:
        """Tells all others, and waits for nobody."""
        head = torch.tensor([len(record), not last], dtype=torch.int64, device="cpu")
        body = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        for peer in self._others:
            with suppress(RuntimeError):  # it is gone, and the thread that hears it says so
                for sent in (head, body):
                    work = dist.isend(sent, peer, tag=self._tag)
                    assert work is not None
                    self._under_way.append((work, sent))

    def leave(self, record: bytes, *, known: bool) -> None:
        """Tells all others why this process leaves."""
        self.tell(record, last=True)
        self.part(UNTIL_TOLD)

    def part(self, seconds: float) -> None:
        """Waits until the others have been told all; a thread goes on with it, for those who come late."""
        waiting = threading.Thread(target=_await, args=[self._under_way], name="gpipe parts", daemon=True)
        waiting.start()
        waiting.join(seconds)


def _listen(peer: int, tag: int, heard: SimpleQueue[Heard]) -> None:
    try:
        goes_on = True
        while goes_on:
            size, goes_on = _receive(torch.empty(2, dtype=torch.int64, device="cpu"), peer, tag).tolist()
            if not 0 < size <= LARGEST:
                raise RuntimeError(f"a record of {size} bytes")
            record = _receive(torch.empty(size, dtype=torch.uint8, device="cpu"), peer, tag)
            heard.put((peer, record.numpy().tobytes()))
    except RuntimeError:
        heard.put((peer, None))


def _receive(room: Tensor, peer: int, tag: int) -> Tensor:
    work = dist.irecv(room, peer, tag=tag)
    assert work is not None
    work.wait(FOREVER)  # how long is too long is for those to say who wait
    return room


def _await(under_way: Sequence[tuple[dist.Work, Tensor]]) -> None:
    for work, _ in under_way:
        with suppress(RuntimeError):
            work.wait(FOREVER)


class Choir:
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
