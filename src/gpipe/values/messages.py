"""The seam between ranks: a worker hands messages over, a transport brings them."""

from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

import torch

from gpipe.values.boundary import BoundaryValue, Gradients

Message: TypeAlias = BoundaryValue | Gradients
ReadyEvent: TypeAlias = torch.cuda.Event | float | None
"""When a tensor that crosses is whole: an event on its maker's stream, or on a CPU the time, for the recorder."""


class Control(IntEnum):
    """What processes tell each other outside of the program: in a label it stands where routes have their place."""

    AGREEMENT = -1
    """What all processes tell each other."""
    TIED_GRADIENTS = -2
    """Gradients of shared weights, between the stages that use them."""
    GRADIENTS = -3
    """Which gradients a replica has, and then the gradients, to the replica that adds them up."""
    SUMMED_GRADIENTS = -4
    """Gradients of all replicas added up."""
    HEADER = -5
    """What the first stage tells the others before a run."""
    WEIGHT = -6
    """By how much the micro-batches of a replica count."""
    OUTPUT = -7
    """An output of the last stage, for the others."""
    DEFERRED_STATISTICS = -8
    """Statistics of BatchNorm over the mini-batch of a replica."""
    MICRO_BATCHES = -9
    """How many micro-batches a replica has."""
    REDUCTION = -10
    """By what a replica averages and scales losses."""
    BATCHNORM = -16
    """Statistics of a micro-batch of a replica, at the stage's first BatchNorm; those of the others follow below."""


class Label(NamedTuple):
    """What a message carries: a route (its place in the program, or a `Control`), micro-batch, value or gradient."""

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
        """Waits for a message to a rank; raises `Cancelled` once the run is."""

    def cancel(self) -> None:
        """Wakes every rank that waits, now or later, with `Cancelled`."""
