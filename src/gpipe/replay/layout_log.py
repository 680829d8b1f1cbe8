"""What events returned, as far as later layers must know it: layouts of tensors, and plain values."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Never

import torch
from torch import Tensor

from gpipe.replay.absent import Absent
from gpipe.replay.errors import CannotSplitError
from gpipe.replay.path import Tag

PLAIN = (bool, int, float, str, type(None))
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
OPAQUE = (
    "between blocks {name} is asked of a value that an earlier layer made and that cannot cross the cuts: it is "
    "neither a tensor nor a plain number or text (an array of numpy, an object of a class). Compute it by torch, "
    "or in a block"
)
_OPAQUE: list[Any] = []


class Unknown:
    """Stands for a value of a kind that does not cross cuts: whoever looks into it is refused."""

    def __getattr__(self, name: str) -> Never:
        """Refuses."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotSplitError(OPAQUE.format(name=name))


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


def stand_in(described: Sequence[Any], tag: Tag, device: torch.device) -> Any:
    """What stands for a leaf that did not cross: a plain value itself."""
    match described:
        case [dtype, shape, wants_gradient]:
            return _absent(tag, dtype, tuple(shape), device, wants_gradient)
        case [value]:
            return value
    return Unknown()


@lru_cache(maxsize=1024)  # each micro-batch asks for the same; one for each tag, since walks tell tensors apart
def _absent(tag: Tag, dtype: str, shape: tuple[int, ...], device: torch.device, wants_gradient: bool) -> Absent:
    return Absent.like(shape, DTYPES[dtype], device, wants_gradient=wants_gradient)


def written(log: Sequence[Sequence[Any]]) -> str:
    """The log as text."""
    return json.dumps(log, separators=(",", ":"))


def read(text: str) -> list[list[Any]]:
    """The log of a text."""
    found: list[list[Any]] = json.loads(text)
    return found
