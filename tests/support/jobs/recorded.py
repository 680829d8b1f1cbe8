"""Jobs that record steps over processes."""

import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import gpipe

STEPS, MICRO_BATCHES, SECONDS = 3, 4, 0.02


class Slow(nn.Linear):
    """A layer that takes no less than some seconds, whatever the machine."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return super().forward(x)


def record(rank: int, world: int) -> dict[str, Any]:
    """Records some steps of four layers and one; gives what the recording says, and the wall time of the loop."""
    torch.manual_seed(0)
    layers = [Slow(3, 3) for _ in range(5)]
    x = torch.ones(8, 3)
    with gpipe.GPipe(layers, [4, 1], MICRO_BATCHES, remat="never", driver="process") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters())
        pipe.step(x, x, mse_loss)
        met = time.perf_counter()
        pipe.exchange(b"")
        with gpipe.record(pipe) as recording:
            for _ in range(STEPS):
                pipe.step(x, x, mse_loss)
                optimizer.step()
            end = time.perf_counter()
        found = recording.breakdown()
        return {
            "wall since all met": end - met,
            "seconds": found.seconds * found.steps,
            "shares": dict(found.shares),
            "ranks": len(found.busy),
            "spans": [sorted({str(s.action) for s in t.spans if s.rank == rank}) for t in recording.timelines],
        }


def metrics(rank: int, world: int) -> dict[str, float]:
    """What steps of one layer a rank come to as numbers."""
    torch.manual_seed(0)
    x = torch.ones(8, 3)
    with gpipe.GPipe([nn.Linear(3, 3) for _ in range(world)], world, MICRO_BATCHES, driver="process") as pipe:
        with gpipe.record(pipe, memory=True) as recording:
            for _ in range(STEPS):
                pipe.step(x, x, mse_loss)
        return recording.metrics()


def throughput(rank: int, world: int) -> tuple[int, int, str]:
    """Two replicas of two ranks, with five rows and three: rows and tokens of a step, and the printed line."""
    torch.manual_seed(0)
    layers = [nn.Embedding(4, 3), nn.Linear(3, 3)]
    with gpipe.GPipe(layers, 2, 2, driver="process") as pipe:
        rows = 5 if rank < 2 else 3
        x, y = torch.ones(rows, 7, dtype=torch.int64), torch.ones(rows, 7, 3)
        with gpipe.record(pipe, flops_per_row=108, device=gpipe.Device(peak=1e6)) as recording:
            for _ in range(STEPS):
                pipe.step(x, y, mse_loss)
        found = recording.metrics()
        rows, tokens = (round(found[f"{name}_per_second"] * found["step_seconds"]) for name in ("rows", "tokens"))
        assert abs(found["mfu"] * world * 1e6 - found["model_flops_per_second"]) < 1e-3
        return rows, tokens, str(recording)


def draw(rank: int, world: int) -> list[str | None]:
    """What a notebook would show on each rank: of a pipe before its first step, of the step, and of a closed pipe."""
    pipe = gpipe.GPipe([nn.Linear(4, 4) for _ in range(world)], world, micro_batches=4, driver="process")
    html = [pipe._repr_html_()]
    x = torch.ones(8, 4)
    with gpipe.record(pipe) as recording:
        pipe.step(x, x, mse_loss)
    if rank:  # the others know nothing of it
        pipe._repr_html_()
        pipe.prediction._repr_html_()
    html += [recording._repr_html_(), pipe.program._repr_html_()]
    pipe.close()
    return [*html, pipe._repr_html_()]
