"""What the first stage tells the others before a run: one message of fixed layout."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor

from gpipe.comm.failures import damaged
from gpipe.comm.mesh import Position
from gpipe.comm.net import Net
from gpipe.values.messages import Control, Label


class Asked(IntEnum):
    """What the user called."""

    STEP = 0
    CALL = 1
    BACKWARD = 2
    NORMS = 3
    EXCHANGE = 4


@dataclass(frozen=True)
class Header:
    """One run, in whole numbers. All but `rows` and `micro_batches` every process knows for itself, too.

    `call` is the number of the call whose backward it is.
    """

    asked: int
    step_number: int
    trains: int
    in_training: int
    gathers: int
    call: int
    checksum: int
    rows: int
    micro_batches: int


WORDS = {
    "asked": "what was called (0 step, 1 the pipe itself, 2 backward, 3 clip_grad_norm_, 4 saving or the like)",
    "step_number": "the step number",
    "trains": "whether gradients are enabled",
    "in_training": "whether the pipe is in training mode",
    "gathers": "gather",
    "call": "the call that backward belongs to",
    "checksum": "the checksum of the program",
}


def tell(net: Net, position: Position, header: Header) -> None:
    """Tells the other stages of this replica."""
    numbers = torch.tensor(astuple(header), dtype=torch.int64)
    for stage in range(1, position.stages):
        net.send_value(position.rank_of(stage), Label(Control.HEADER, 0, gradient=False), numbers)


def hear(net: Net, position: Position) -> Header:
    """Waits for what the first stage tells."""
    first = position.rank_of(0)
    numbers = net.receive_value(first, Label(Control.HEADER, 0, gradient=False))
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.int64 or numbers.shape != (len(fields(Header)),):
        raise damaged(first, "a header that is none")
    return Header(*numbers.tolist())


def compare(told: Header, own: Header, position: Position) -> None:
    """Checks that this process does what the first stage does.

    Raises:
        ValueError: Names what differs.
    """
    mistakes = list(_differences(told, own, position))
    if mistakes:
        raise ValueError(
            f"the processes have come apart: {'; '.join(mistakes)}. Call the pipe in every process, as often, and "
            f"with the same arguments"
        )


def _differences(told: Header, own: Header, position: Position) -> Iterator[str]:
    first = position.rank_of(0)
    if told.asked != own.asked:  # all else follows
        yield f"{WORDS['asked']} is {told.asked} on rank {first} and {own.asked} on rank {position.rank}"
        return
    for field in fields(Header):
        theirs, mine = getattr(told, field.name), getattr(own, field.name)
        if theirs != mine and field.name in WORDS:
            yield f"{WORDS[field.name]} is {theirs} on rank {first} and {mine} on rank {position.rank}"
