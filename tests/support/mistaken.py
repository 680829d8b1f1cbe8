"""A small pipe that is given what is wrong, and what it says to that."""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe

X, Y = torch.ones(8, 4), torch.zeros(8, 2)


def layers() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]


def make(found: Any = None, **how: Any) -> gpipe.GPipe:
    return gpipe.GPipe(found or layers(), how.pop("partitions", 2), how.pop("micro_batches", 2), **how)


def refusal(call: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    return "".join(traceback.format_exception_only(raised.value))


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y
