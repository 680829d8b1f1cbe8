"""Jobs that record steps over processes."""

import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import gpipe

STEPS = 3


class Slow(nn.Linear):
    """A layer that takes so many seconds, whatever the machine."""

    def __init__(self, seconds: float) -> None:
        super().__init__(3, 3)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleeps first."""
        time.sleep(self.seconds)
        return super().forward(x)


def record(rank: int, world: int, seconds: list[float], partitions: list[int]) -> dict[str, Any]:
    """Records some steps; gives what the recording says, and the wall time of the loop."""
    torch.manual_seed(0)
    layers = [Slow(some) for some in seconds]
    x = torch.ones(8, 3)
    with gpipe.GPipe(layers, partitions, 4, remat="never", costs=seconds, driver="process") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters())
        pipe.step(x, x, mse_loss)
        met = time.perf_counter()
        pipe.team.exchange(b"")
        with gpipe.record(pipe) as recording:
            start = time.perf_counter()
            for _ in range(STEPS):
                pipe.step(x, x, mse_loss)
                optimizer.step()
            end = time.perf_counter()
        found = recording.breakdown()
        return {
            "wall": end - start,
            "wall since all met": end - met,
            "seconds": found.seconds * found.steps,
            "shares": dict(found.shares),
            "ranks": len(found.busy),
            "sentence": recording.explain(),
            "advice": [str(a) for a in recording.advice()] + [str(found)],
            "spans": [sorted({str(s.action) for s in t.spans if s.rank == rank}) for t in recording.timelines],
        }
