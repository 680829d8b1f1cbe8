"""Messages between the processes of the world before they are linked: nobody waits for one that is gone.

gloo reports a death at once, but only to who waits for a message from that very process; torch's store reports none.
So a thread for each other process waits for its next message, as long as the rendezvous lasts: whoever waits for all
sees first what comes first, a message or the end of a process. A process has sent all when a message is its last.
"""

import atexit
import threading
import time
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from itertools import count
from queue import SimpleQueue
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

FIRST_TAG = 0x67700000  # of messages; whoever else sends through this group counts from 0
FOREVER = timedelta(days=365)
LARGEST_MESSAGE_BYTES = 2**26
FAREWELL_SECONDS = 1.0  # that a process which fails waits for the others to take that in


class Kind(IntEnum):
    """What a message of the rendezvous is."""

    VALUE = 0
    LAST = 1
    FAILURE = 2


class Received(NamedTuple):
    """A message and who sent it; None: that process is gone."""

    peer: int
    kind: Kind
    message: bytes | None


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
    """Sends messages to all other processes, and has theirs in `received` as soon as they are here.

    A thread that waits in gloo while the interpreter ends would take the process down with it, should the other end
    be gone just then. So whoever leaves early waits a little for the others, and hangs up at the end.
    """

    def __init__(self) -> None:
        self.received: SimpleQueue[Received] = SimpleQueue()
        self._group = gloo_group()
        self._tag = FIRST_TAG + next(_opened.setdefault(self._group, count())) % 2**20
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._receivers = {
            peer: threading.Thread(target=self._receive_all, args=[peer], name=f"gpipe receives {peer}", daemon=True)
            for peer in range(dist.get_world_size())
            if peer != dist.get_rank()
        }
        self._senders: list[threading.Thread] = []
        self._has_sent_last = False
        atexit.register(self._hang_up)
        for receiver in self._receivers.values():
            receiver.start()

    def send(self, message: bytes, kind: Kind = Kind.VALUE) -> None:
        """Sends a message to all others, and waits for nobody; nothing follows the last one, or a failure."""
        if self._has_sent_last:
            return
        self._has_sent_last = kind is not Kind.VALUE
        head = torch.tensor([len(message), kind], dtype=torch.int64, device="cpu")
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for peer in self._receivers:
            with suppress(RuntimeError):  # it is gone, and the thread that receives from it says so
                for sent in (head, body):
                    self._under_way.append((self._group.send([sent], peer, self._tag), sent))

    def close(self, seconds: float = FAREWELL_SECONDS) -> None:
        """Waits until all have sent and received all; threads go on with it, for those who come late."""
        until = time.monotonic() + seconds
        self._senders.append(threading.Thread(target=self._await_sent, name="gpipe sends", daemon=True))
        self._senders[-1].start()
        threads = (*self._senders, *self._receivers.values())
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):
            atexit.unregister(self._hang_up)

    def _receive_all(self, peer: int) -> None:
        try:
            kind = Kind.VALUE
            while kind is Kind.VALUE:
                size, number = self._receive(torch.empty(2, dtype=torch.int64, device="cpu"), peer).tolist()
                if not 0 < size <= LARGEST_MESSAGE_BYTES or number not in tuple(Kind):
                    raise RuntimeError(f"a message of {size} bytes and kind {number}")
                kind = Kind(number)
                message = self._receive(torch.empty(size, dtype=torch.uint8, device="cpu"), peer)
                self.received.put(Received(peer, kind, message.numpy().tobytes()))
        except RuntimeError:
            self.received.put(Received(peer, Kind.LAST, None))

    def _receive(self, memory: Tensor, peer: int) -> Tensor:
        self._group.recv([memory], peer, self._tag).wait(FOREVER)  # how long is too long is for those to say who wait
        return memory

    def _await_sent(self) -> None:
        for work, _ in self._under_way:
            with suppress(RuntimeError):
                work.wait(FOREVER)

    def _hang_up(self) -> None:
        """Has gloo end the connections on which threads still wait, as it does after a timeout."""
        unsent = any(sender.is_alive() for sender in self._senders)
        for peer, receiver in self._receivers.items():
            if unsent or receiver.is_alive():
                with suppress(RuntimeError):
                    self._group.recv([torch.empty(1)], peer, self._tag).wait(timedelta(milliseconds=1))
        for thread in (*self._senders, *self._receivers.values()):
            thread.join(FAREWELL_SECONDS)
