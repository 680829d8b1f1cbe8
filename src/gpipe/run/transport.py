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


class RemoteError(RuntimeError):
    """Another process of the pipe failed, and with it this step here too.

    Attributes:
        rank: The number of the process that failed, `replica * stages + stage`.
        type_name: The type of its exception, by name; empty if the process is gone without a word.
        traceback: Its traceback as text, as far as there is one.

    Example:
        >>> import gpipe
        >>> gpipe.RemoteError("rank 1 failed: ValueError: no", rank=1, type_name="ValueError").rank
        1
    """

    def __init__(self, message: str, rank: int, type_name: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.type_name = type_name
        self.traceback = traceback
        self.heard = False  # from another process, not raised by the user's own code


def heard(message: str, rank: int, type_name: str = "", its_traceback: str = "") -> RemoteError:
    """The exception of a failure in another process."""
    error = RemoteError(message, rank, type_name, its_traceback)
    error.heard = True
    return error


class Transport(Protocol):
    """Carries messages between ranks."""

    cancelled: bool

    def reach(self, at: int) -> None:
        """Notes how far in its row a rank is."""

    def send(self, rank: int, label: Label, message: Message, mark: Mark) -> None:
        """Hands a message to a rank, without waiting for it."""

    def receive(self, rank: int, label: Label) -> tuple[Message, Mark]:
        """Waits for a message to this rank.

        Raises:
            Cancelled: The run was cancelled.
        """

    def cancel(self) -> None:
        """Wakes every rank that waits, now or later, with `Cancelled`."""
