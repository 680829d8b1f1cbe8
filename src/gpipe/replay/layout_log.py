"""What events returned, as far as later layers must know it: layouts of tensors, and plain values."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe.replay.absent import Absent

PLAIN = (bool, int, float, str, type(None))
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_OPAQUE: list[Any] = []


class Unknown:
    """Stands for a value of a kind that does not cross cuts."""


def describe(leaves: Sequence[Any]) -> list[Any]:
    """What is written down of what an event returned.

    >>> describe([torch.ones(2, 3), 7, object()])
    [['torch.float32', [2, 3], False], [7], []]
    """
    return [
        [str(leaf.dtype), list(leaf.shape), leaf.requires_grad]
        if isinstance(leaf, Tensor)
        else ([leaf] if isinstance(leaf, PLAIN) else _OPAQUE)
        for leaf in leaves
    ]


def stand_in(described: Sequence[Any], device: torch.device) -> Any:
    """What stands for a leaf that did not cross: a plain value itself."""
    match described:
        case [dtype, shape, wants_gradient]:
            return Absent.like(shape, DTYPES[dtype], device, wants_gradient=wants_gradient)
        case [value]:
            return value
    return Unknown()


def written(log: Sequence[Sequence[Any]]) -> str:
    """The log as text."""
    return json.dumps(log, separators=(",", ":"))


def read(text: str) -> list[list[Any]]:
    """The log of a text."""
    found: list[list[Any]] = json.loads(text)
    return found
