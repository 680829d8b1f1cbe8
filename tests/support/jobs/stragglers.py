"""Jobs in which one rank is slower than it should be."""

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import gpipe
from tests.support.clock import Clock

SECONDS = 0.03


class Slow(nn.Linear):
    def __init__(self, seconds: float, clock: Clock) -> None:
        super().__init__(4, 4)
        self.seconds, self.clock = seconds, clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(self.seconds)
        return super().forward(x)


def warned(rank: int, world: int, slow: int, times: float, measured: bool, steps: int) -> list[str]:
    """What a rank warns of when all layers of the rank `slow` take so many times as long; -1 for any."""
    with pytest.MonkeyPatch.context() as patch:
        seconds, clock = SECONDS * (times if rank in (slow, -1) else 1), Clock(patch)
        return warnings_of([Slow(seconds, clock) for _ in range(world)], measured, steps)


def warnings_of(layers: Sequence[nn.Module], measured: bool, steps: int) -> list[str]:
    """What this rank warns of while it trains layers, one a stage."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gpipe").addHandler(handler)
    sample = torch.ones(8, 4) if measured else None
    try:
        with gpipe.GPipe(
            layers, [1] * len(layers), 2, remat="never", seed=0, sample=sample, driver="process"
        ) as pipe:
            for _ in range(steps):
                pipe.step(torch.ones(16, 4), torch.ones(16, 4), nn.functional.mse_loss)
    finally:
        logging.getLogger("gpipe").removeHandler(handler)
    return found
