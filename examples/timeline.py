"""Draws two real steps, one above the other: naive model parallelism (M=1) and the pipeline (M=8).

    python examples/timeline.py docs/timeline.svg

Eight layers that take their time without a core, so that four partitions overlap on any machine: 20 ms forward and
40 ms backward for eight rows. It is Figure 2 of the paper, (b) and (c), as it happened.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from gpipe.plan.timeline import Timeline
from gpipe.report.svg import timelines_svg

ROWS = 8
SECONDS_A_ROW = 0.020 / ROWS


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(len(x) * SECONDS_A_ROW)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * len(gradient) * SECONDS_A_ROW)
        return gradient


class Slow(nn.Module):
    """A layer that scales its input and takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Scales, then waits."""
        waited: Tensor = _Wait.apply(x * self.scale)  # type: ignore[no-untyped-call]
        return waited


def record(micro_batches: int) -> Timeline:
    """The fastest of five steps of four partitions."""
    pipe = gpipe.GPipe([Slow() for _ in range(8)], partitions=4, micro_batches=micro_batches, remat="never")
    batch = torch.ones(ROWS, 1)
    with pipe, gpipe.record(pipe) as recording:
        for _ in range(5):
            pipe.step(batch, batch, nn.functional.mse_loss)
    return min(recording.timelines, key=lambda timeline: timeline.seconds)


if __name__ == "__main__":
    pictures = {
        "Naive model parallelism: one micro-batch": record(1),
        "GPipe: the same rows as eight micro-batches": record(8),
    }
    Path(sys.argv[1]).write_text(timelines_svg(pictures), encoding="utf-8")
