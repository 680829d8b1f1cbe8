"""Two steps of a small pipe beside the plain loop, and layers that do anything to what they are given."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS, assert_same_bits, plain_loop, same_bits, weights_of

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


def check(
    layers: list[nn.Module],
    cut: Sequence[int],
    driver: str,
    remat: str,
    loss_fn: Callable[..., Tensor] = F.mse_loss,
    plain_loss_fn: Callable[..., Tensor] | None = None,
) -> None:
    """Two steps of a pipe are those of the plain loop."""
    reference = copy.deepcopy(layers)
    with gpipe.GPipe(layers, cut, M, driver=driver, remat=remat, seed=5) as pipe:
        for step in range(2):
            loss = pipe.step(X, Y, loss_fn, reduction="mean")
            plain = plain_loop(reference, X, Y, plain_loss_fn or loss_fn, micro_batches=M, seed=5, step=step)
            assert same_bits(loss, plain)
            assert_same_bits(pipe, reference)
