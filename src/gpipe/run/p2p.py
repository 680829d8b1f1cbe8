"""Messages between processes: the transport of one run.

The number of a rank in a row is its stage; its process is that stage of the same replica.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from gpipe.plan.action import Kind
from gpipe.plan.program import Program
from gpipe.plan.rules import sender_of
from gpipe.run.lane import Mark
from gpipe.run.net import Net
from gpipe.run.status import Seen
from gpipe.run.transport import Label, Message


class P2P:
    """Carries messages between the ranks of a replica."""

    cancelled = False

    def __init__(self, net: Net, first: int) -> None:
        self.net = net
        self.first = first  # the process of the replica's stage 0
        self._senders: Mapping[Label, int] = {}

    def begin(self, program: Program, rank: int, sees: Callable[[int, Seen], str]) -> None:
        """Begins a row."""
        inbound = find_inbound(program, rank)
        self._senders = {label: self.first + stage for (stage, label) in inbound}
        self.net.expect({(self.first + stage, label): at for (stage, label), at in inbound.items()}, sees)

    def reach(self, at: int) -> None:
        """Notes how far in its row this rank is."""
        self.net.reach(at)

    def send(self, rank: int, label: Label, message: Message, mark: Mark) -> None:
        """Puts a message on its way to a rank; waits only while too many are under way already."""
        self.net.send(self.first + rank, label, message)

    def receive(self, rank: int, label: Label) -> tuple[Message, Mark]:
        """Waits for a message to this rank."""
        return self.net.receive(self._senders[label], label)

    def cancel(self) -> None:
        """Nothing to wake: this process has one rank, and the others learn of it by `Net.fail`."""


@lru_cache(64)
def find_inbound(program: Program, rank: int) -> Mapping[tuple[int, Label], int]:
    """Where in a rank's row it receives each message, by the rank that sends it."""
    numbers = {route: number for number, route in enumerate(program.routes)}
    found = {}
    for at, action in enumerate(program.rows[rank]):
        if action.kind is Kind.RECEIVE:
            assert action.route is not None
            assert action.micro_batch is not None
            label = Label(numbers[action.route], action.micro_batch, action.carries_gradient)
            found[program.rank_of[sender_of(action)], label] = at
    return found
