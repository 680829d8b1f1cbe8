"""Small networks with suitable inputs and losses."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.plain_loop import weights_of

WIDTH = 6
WORDS = 11


def data(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, WIDTH, generator=generator), torch.randn(*shape, WIDTH, generator=generator)


def words(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (rows, 5), generator=generator)
    return x, x.roll(-1, 1)


def network(seed: int = 0) -> list[nn.Module]:
    """Eight layers that use random numbers, for rows of any shape."""
    with weights_of(seed):
        return [
            nn.Linear(WIDTH, 9), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(9),
            nn.Linear(9, 7), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(7, WIDTH),
        ]  # fmt: skip


def normed() -> list[nn.Module]:
    with weights_of(1):
        return [
            nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(),
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, WIDTH),
        ]  # fmt: skip


def tied_network() -> list[nn.Module]:
    """Ten layers for tokens. The first and the last have weights of one shape."""
    with weights_of(3):
        return [nn.Embedding(WORDS, WIDTH), *network()[:-1], nn.Linear(7, WIDTH), nn.Linear(WIDTH, WORDS)]


def squared(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def with_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    error = (output.detach() - target).abs()
    return F.mse_loss(output, target), {"worst": error.max(), "of rows": (error.sum(1), len(target)), "none": None}
