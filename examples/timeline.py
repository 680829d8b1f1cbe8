"""Draws two recorded steps, one above the other: naive model parallelism (M=1) and the pipeline (M=8).

    python examples/timeline.py docs/timeline.svg
    python examples/timeline.py page.html  # only the pipeline, compared with its prediction

The eight layers sleep, so that four partitions run in parallel on any machine: 20 ms in the forward pass and 40 ms in
the backward pass for eight rows. This is Figure 2 (b) and (c) of the paper, as recorded.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from gpipe.profiling import report_html, timelines_svg

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
    """Scales its input, and sleeps in the forward and the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Scales the input, then sleeps."""
        waited: Tensor = _Wait.apply(x * self.scale)  # type: ignore[no-untyped-call]
        return waited


def record(micro_batches: int) -> gpipe.Recording:
    """Records five steps of four partitions."""
    layers, batch = [Slow() for _ in range(8)], torch.ones(ROWS, 1)
    pipe = gpipe.GPipe(layers, partitions=4, micro_batches=micro_batches, sample=batch, remat="never")
    with pipe:
        pipe.step(batch, batch, nn.functional.mse_loss)  # the first step starts the threads
        with gpipe.record(pipe) as recording:
            for _ in range(5):
                pipe.step(batch, batch, nn.functional.mse_loss)
    return recording


def picture() -> str:
    """Draws the fastest step of each recording, one above the other."""
    titles = {1: "Naive model parallelism: one micro-batch", 8: "GPipe: the same rows as eight micro-batches"}
    fastest = (min(record(m).timelines, key=lambda timeline: timeline.seconds) for m in titles)
    return timelines_svg(dict(zip(titles.values(), fastest, strict=True)))


def page() -> str:
    """Writes a page with all steps of the pipeline."""
    told = {"partitions": 4, "micro batches": 8, "layers": 8, "remat": "never", "schedule": "gpipe"}
    report = record(8).report("Eight layers, four partitions, eight micro-batches")
    return report_html(replace(report, configuration=told))


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(page() if file.suffix == ".html" else picture(), encoding="utf-8")
