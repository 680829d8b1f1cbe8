"""A small network with a BatchNorm and a dropout, and how it trains."""

from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import squares, weights_of

M = 3
_generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(7, 5, generator=_generator), torch.randn(7, 3, generator=_generator)


def build() -> list[nn.Module]:
    with weights_of(1):
        return [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3)]


def make(layers: Any = None, **changes: Any) -> gpipe.GPipe:
    options = {"partitions": 3, "micro_batches": M, "driver": "lockstep", "seed": 4}
    return gpipe.GPipe(layers or build(), **{**options, **changes})


def train(pipe: nn.Module, steps: int) -> list[Tensor]:
    """Some steps of training, with an optimizer that has nothing of its own to remember."""
    assert isinstance(pipe, gpipe.GPipe)
    losses = []
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(steps):
        losses.append(pipe.step(X, Y, squares))
        optimizer.step()
        optimizer.zero_grad()
    return losses
