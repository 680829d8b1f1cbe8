"""The seam between ranks: a worker hands messages over, a transport brings them."""

from typing import NamedTuple, Protocol, TypeAlias

import torch

from gpipe.values.boundary import BoundaryValue, Gradients

Message: TypeAlias = BoundaryValue | Gradients
ReadyEvent: TypeAlias = torch.cuda.Event | float | None
"""When a tensor that crosses is whole: an event on its maker's stream, or on a CPU the time, for the recorder."""


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

    def reach(self, at: int) -> None:
        """Notes how far in its row a rank is."""

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        """Hands a message to a rank, without waiting for it."""

    def receive(self, rank: int, sender: int, label: Label) -> tuple[Message, ReadyEvent]:
        """Waits for a message to a rank.

        Raises:
            Cancelled: The run was cancelled.
        """

    def cancel(self) -> None:
        """Wakes every rank that waits, now or later, with `Cancelled`."""
