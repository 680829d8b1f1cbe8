"""Small networks of layers that do anything to what they are given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.plain_loop import REMATS, weights_of

M = 3
X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))

CUTS = pytest.mark.parametrize("cut", [[4], [2, 2], [1, 1, 1, 1]], ids=str)
DRIVERS = pytest.mark.parametrize("driver", ["threads", "lockstep"])
REMAT = pytest.mark.parametrize("remat", REMATS)


class Do(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, work: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.work = work

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.work(x))


def network(*middle: Callable[[Tensor], Any]) -> list[nn.Module]:
    with weights_of(3):
        return [nn.Linear(4, 4), *map(Do, middle), nn.Linear(4, 4)]
