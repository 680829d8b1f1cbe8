"""Messages between the processes of a replica: the transport of one run."""

from collections.abc import Callable

from gpipe.comm.mesh import Position
from gpipe.comm.net import Net
from gpipe.comm.status import Seen
from gpipe.runtime.steps import Inbound
from gpipe.values.messages import Label, Message, ReadyEvent


class P2P:
    """Carries messages between the ranks of a replica."""

    cancelled = False

    def __init__(self, net: Net, position: Position) -> None:
        self.net = net
        self.position = position

    def begin(self, inbound: Inbound, sees: Callable[[int, Seen], str]) -> None:
        """Begins a row."""
        self.net.expect(inbound.due, set(map(self.position.rank_of, inbound.senders)), sees)

    def reach(self, at: int) -> None:
        """Notes how far in its row this rank is."""
        self.net.reach(at)

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        """Puts a message on its way to a rank; waits only while too many are under way already."""
        self.net.send(self.position.rank_of(rank), label, message)

    def receive(self, rank: int, sender: int, label: Label) -> tuple[Message, ReadyEvent]:
        """Waits for a message to this rank."""
        return self.net.receive(self.position.rank_of(sender), label)

    def cancel(self) -> None:
        """Nothing to wake: this process has one rank, and the others learn of it by `Net.fail`."""
