"""Messages between processes: the transport of one run.

The number of a rank in a row is its stage; its process is that stage of the same replica.
"""

from collections.abc import Callable

from gpipe.comm.net import Net
from gpipe.comm.status import Seen
from gpipe.runtime.rows import Inbound
from gpipe.values.messages import Label, Message, ReadyEvent


class P2P:
    """Carries messages between the ranks of a replica."""

    cancelled = False

    def __init__(self, net: Net, first: int) -> None:
        self.net = net
        self.first = first  # the process of the replica's stage 0
        self._inbound = Inbound({}, {})

    def begin(self, inbound: Inbound, sees: Callable[[int, Seen], str]) -> None:
        """Begins a row."""
        self._inbound = inbound
        self.net.expect(inbound.due, {self.first + rank for rank in inbound.senders.values()}, sees)

    def reach(self, at: int) -> None:
        """Notes how far in its row this rank is."""
        self.net.reach(at)

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        """Puts a message on its way to a rank; waits only while too many are under way already."""
        self.net.send(self.first + rank, label, message)

    def receive(self, rank: int, label: Label) -> tuple[Message, ReadyEvent]:
        """Waits for a message to this rank."""
        return self.net.receive(self.first + self._inbound.senders[label], label)

    def cancel(self) -> None:
        """Nothing to wake: this process has one rank, and the others learn of it by `Net.fail`."""
