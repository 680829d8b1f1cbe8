"""A small network of layers four wide, one that uses other parameters each time among them, and how it trains."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support import plain_loop as laws
from tests.support.plain_loop import mini_batch

M = 3
W = 4


class Experts(nn.Module):
    """Each micro-batch uses one parameter of three."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(torch.randn(W) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.experts[int(x.detach().abs().sum() * 100) % 2]


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    return mini_batch(W, 2, rows)


def train(pipe: gpipe.GPipe, way: str = "step") -> Tensor:
    return laws.train(pipe, *data(), F.mse_loss, way)


def train_plainly(layers: Sequence[nn.Module], way: str = "step", step: int = 0) -> Tensor:
    return laws.train_plainly(layers, *data(), F.mse_loss, way, micro_batches=M, seed=5, step=step)
