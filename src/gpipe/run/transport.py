"""The seam between ranks: a worker hands messages over, a transport brings them."""

from typing import NamedTuple, Protocol, TypeAlias

from gpipe.run.boundary import Gradients, Parcel
from gpipe.run.lane import Mark

Message: TypeAlias = Parcel | Gradients


class Label(NamedTuple):
    """What a message carries: which route (its place in the program), which micro-batch, value or gradient."""

    route: int
    micro_batch: int
    gradient: bool


class Cancelled(BaseException):
    """Ends a rank that waits for a message which will not come, because another rank failed."""


class Transport(Protocol):
    """Carries messages between ranks."""

    cancelled: bool

    def send(self, rank: int, label: Label, message: Message, mark: Mark) -> None:
        """Hands a message to a rank, without waiting for it."""

    def receive(self, rank: int, label: Label) -> tuple[Message, Mark]:
        """Waits for a message to this rank.

        Raises:
            Cancelled: The run was cancelled.
        """

    def cancel(self) -> None:
        """Wakes every rank that waits, now or later, with `Cancelled`."""
