"""Records the messages that cross between processes in one run. Each end records its own view."""

from typing import Any, NamedTuple, Self

from gpipe.stages.messages import Label


class Payload(NamedTuple):
    """A tensor of a message; `size` are the bytes that travel, what is only repeated once."""

    dtype: str
    shape: tuple[int, ...]
    size: int


class Crossed(NamedTuple):
    """A message, as one of its ends knows it; times are in seconds."""

    sends: bool
    peer: int
    label: Label
    tensors: tuple[Payload, ...]
    asked: float  # when this end called for it
    begun: float  # when a sender had room and began to write; a receiver does not know it, and has when it asked
    ended: float  # when this end was done


class Traffic(NamedTuple):
    """All that one process sent and received in a run; `routes` are what the numbers of labels stand for."""

    routes: tuple[str, ...] = ()
    micro_batches: int = 0
    crossed: tuple[Crossed, ...] = ()

    def moved(self, by: float) -> Self:
        """The same by another clock."""
        crossed = (
            one._replace(asked=one.asked + by, begun=one.begun + by, ended=one.ended + by) for one in self.crossed
        )
        return self._replace(crossed=tuple(crossed))

    @classmethod
    def of_json(cls, told: list[Any]) -> Self:
        routes, micro_batches, rows = told
        crossed = []
        for sends, peer, label, kind, *times in rows:
            tensors = tuple(Payload(dtype, tuple(shape), size) for dtype, shape, size in kind)
            crossed.append(Crossed(sends, peer, Label(*label), tensors, *times))
        return cls(tuple(routes), micro_batches, tuple(crossed))
