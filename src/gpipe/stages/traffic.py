"""Records the messages that each process sends and receives in one run."""

from typing import Any, NamedTuple, Self

from gpipe.stages.messages import Label


class Payload(NamedTuple):
    """A tensor in a message. `size` is the number of bytes sent. Repeated elements of expanded tensors count once."""

    dtype: str
    shape: tuple[int, ...]
    size: int


class Crossed(NamedTuple):
    """A message, as the sender or the receiver recorded it. Times are in seconds.

    Attributes:
        sends: Whether this process sent the message.
        peer: The rank of the other process.
        label: The label of the message.
        tensors: The tensors in the message.
        asked: The time at which this process called send or receive.
        begun: The time at which the sender had buffer space and began to write. In the receiver, the same time as
            `asked`.
        ended: The time at which send or receive returned.
    """

    sends: bool
    peer: int
    label: Label
    tensors: tuple[Payload, ...]
    asked: float
    begun: float
    ended: float


class Traffic(NamedTuple):
    """All messages that one process sent and received in a run.

    Attributes:
        routes: The names of the routes. Labels contain indices into this list.
        micro_batches: The number of micro-batches.
        crossed: The messages.
    """

    routes: tuple[str, ...] = ()
    micro_batches: int = 0
    crossed: tuple[Crossed, ...] = ()

    def moved(self, by: float) -> Self:
        """Returns the same messages with all times shifted by some seconds."""
        crossed = (
            message._replace(asked=message.asked + by, begun=message.begun + by, ended=message.ended + by)
            for message in self.crossed
        )
        return self._replace(crossed=tuple(crossed))

    @classmethod
    def of_json(cls, value: list[Any]) -> Self:
        routes, micro_batches, rows = value
        crossed = []
        for sends, peer, label, tensors, *times in rows:
            payloads = tuple(Payload(dtype, tuple(shape), size) for dtype, shape, size in tensors)
            crossed.append(Crossed(sends, peer, Label(*label), payloads, *times))
        return cls(tuple(routes), micro_batches, tuple(crossed))
