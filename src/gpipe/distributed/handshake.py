"""What the first stage says to the others before a run: one message of whole numbers."""

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field, fields, replace

import torch
from torch import Tensor

from gpipe.distributed.agree import differences
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.frames import damaged
from gpipe.distributed.mesh import Position
from gpipe.stages.messages import Control, Label


@dataclass(frozen=True)
class Header:
    """One run, in whole numbers. What stands before `ready_made` every process knows for itself.

    Attributes:
        call: The number of the call whose backward it is.
        own_loss: Whether the loss is the model's own.
        ready_made: Whether the micro-batches were given as such.
        path: The number of the path that a model takes that is replayed.
        rows: Of each micro-batch.
        own_weights: Of each micro-batch in the model's own loss, if it gives one.
    """

    request: int
    step_number: int = 0
    trains: int = 0
    in_training: int = 0
    gathers: int = 0
    call: int = 0
    checksum: int = 0
    own_loss: int = 0
    ready_made: int = 0
    path: int = 0
    rows: tuple[int, ...] = field(default=(), kw_only=True)
    own_weights: tuple[float, ...] = field(default=(), kw_only=True)

    @property
    def micro_batches(self) -> int:
        """How many there are."""
        return len(self.rows)


NUMBERS = len(fields(Header)) - 2  # before those of each micro-batch


WORDS = {
    "request": "what was called (0 step, 1 the pipe itself, 2 backward, 3 clip_grad_norm_, 4 saving or the like)",
    "step_number": "the step number",
    "trains": "whether gradients are enabled",
    "in_training": "whether the pipe is in training mode",
    "gathers": "gather",
    "call": "the call that backward belongs to",
    "own_loss": "whether the loss is the model's own",
    "checksum": "the checksum of the program (of schedule=, if that is a function, remat, and what layers share)",
}


def _send(net: Endpoint, peers: Iterable[int], header: Header) -> None:
    """Sends a header to other processes."""
    own_weights = torch.tensor(header.own_weights, dtype=torch.float64).view(torch.int64)
    numbers = torch.tensor([*astuple(header)[:NUMBERS], len(header.rows), *header.rows], dtype=torch.int64)
    numbers = torch.cat([numbers, own_weights])
    for peer in peers:
        net.send_value(peer, Label(Control.HEADER, 0, gradient=False), numbers)


def _receive(net: Endpoint, first: int) -> Header:
    """Waits for what the process of the first stage sends."""
    numbers = net.receive_value(first, Label(Control.HEADER, 0, gradient=False))
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.int64 or not _fits(numbers):
        raise damaged(first, "a header that is none")
    *known, count = numbers[: NUMBERS + 1].tolist()
    rows, own_weights = numbers[NUMBERS + 1 :].split([count, len(numbers) - NUMBERS - 1 - count])
    return Header(*known, rows=tuple(rows.tolist()), own_weights=tuple(own_weights.view(torch.float64).tolist()))


def _fits(numbers: Tensor) -> bool:
    if numbers.dim() != 1 or len(numbers) <= NUMBERS:
        return False
    count = int(numbers[NUMBERS])
    return count >= 0 and len(numbers) - NUMBERS - 1 in (count, 2 * count)


def _in_words(header: Header) -> dict[str, str]:
    return {words: str(int(getattr(header, name))) for name, words in WORDS.items()}


def compare_headers(
    net: Endpoint,
    position: Position,
    first: int,
    own: Header,
    checksum: Callable[[Header], int] = lambda header: 0,
) -> Header:
    """Gives all processes of a replica the header of that of the first stage, if they do the same.

    `checksum` is that of the table for a header.

    Raises:
        ValueError: This process does something else.
    """
    if net.rank == first:
        header = replace(own, checksum=checksum(own))
        _send(net, [peer for peer in position.ranks_of_replica if peer != first], header)
        return header
    header = _receive(net, first)
    if header.request == own.request and header.trains == own.trains:
        own = replace(own, checksum=checksum(header))
    mistakes = differences({first: _in_words(header), net.rank: _in_words(own)})
    if mistakes:
        mistakes = mistakes[:1] if header.request != own.request else mistakes  # all else follows
        raise ValueError(
            f"the processes have come apart: {'; '.join(mistakes)}. Call the pipe in every process, as often, and "
            f"with the same arguments"
        )
    return header
