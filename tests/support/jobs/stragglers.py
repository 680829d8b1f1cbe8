"""Jobs in which one rank is slower than it should be."""

import logging
import time

import torch
from torch import Tensor, nn

import gpipe

SECONDS = 0.03  # far more than the rest of a step takes, also on a busy machine


class Sleeping(nn.Linear):
    """A layer that takes so many times as long as others, on one rank; -1 for any."""

    def __init__(self, own: int, rank: int, times: float) -> None:
        super().__init__(4, 4)
        self.seconds = SECONDS * (times if rank in (own, -1) else 1)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def warned(rank: int, world: int, slow: int, times: float, measured: bool, steps: int) -> list[str]:
    """What a rank warns of when all layers of the rank `slow` sleep longer."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gpipe").addHandler(handler)
    layers = [Sleeping(rank, slow, times) for _ in range(world)]
    sample = torch.ones(8, 4) if measured else None
    try:
        with gpipe.GPipe(layers, [1] * world, 2, seed=0, sample=sample, driver="process") as pipe:
            for _ in range(steps):
                pipe.step(torch.ones(16, 4), torch.ones(16, 4), nn.functional.mse_loss)
    finally:
        logging.getLogger("gpipe").removeHandler(handler)
    return found
