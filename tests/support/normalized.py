"""Small networks with a BatchNorm, and how they train."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import mini_batch

M = 4
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def network(norm: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 6), norm(), nn.Tanh(), norm(), nn.Dropout(0.2), nn.Linear(6, 2)]


def data(rows: int = 14) -> tuple[Tensor, Tensor]:
    return mini_batch(3, 2, rows)


def train(pipe: gpipe.GPipe, way: str = "step", rows: int = 14) -> None:
    x, y = data(rows)
    if way == "step":
        pipe.step(x, y, F.mse_loss)
    else:
        F.mse_loss(pipe(x), y).backward()


def buffers_of(layers: Sequence[nn.Module] | nn.Module) -> dict[str, Tensor]:
    module = layers if isinstance(layers, nn.Module) else nn.Sequential(*layers)
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_close(one: nn.Module, other: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for name in BUFFERS:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=rtol, atol=atol)
