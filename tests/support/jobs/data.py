"""Jobs with data as it should not be, and ranks that do not do the same."""

import torch
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import squares

FEATURES, LAYERS, MICRO_BATCHES = 6, 4, 4


def batch(
    rows: int = 10, target_rows: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    targets = torch.ones(rows if target_rows is None else target_rows, FEATURES)
    return torch.ones(rows, FEATURES, dtype=dtype), targets


ON_ALL_RANKS = {
    "no rows": batch(0),
    "inputs of another dtype": batch(dtype=torch.float64),
    "whole numbers": batch(dtype=torch.long),
    "targets of other rows": batch(target_rows=8),
}
ON_THE_LAST = {"more rows on the last rank": batch(12)}


def make(world: int) -> gpipe.GPipe:
    layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.3), nn.Tanh()) for _ in range(LAYERS)]
    return gpipe.GPipe(layers, [LAYERS // world] * world, MICRO_BATCHES, seed=0, driver="process")


def refused(rank: int, world: int, name: str) -> None:
    """A step, and another that must not be."""
    pipe = make(world)
    pipe.step(*batch(), squares)
    wrong = ON_ALL_RANKS if rank < world - 1 else ON_ALL_RANKS | ON_THE_LAST
    pipe.step(*wrong.get(name, batch()), squares)


def step_more(rank: int, world: int, who: int) -> None:
    """A step on all ranks, and one more on one of them."""
    pipe = make(world)
    for _ in range(1 + (rank == who)):
        pipe.step(*batch(), squares)
