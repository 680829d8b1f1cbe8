"""Jobs whose rematerialization or whole plan is found for them."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import gpipe
from tests.support.plain_loop import weights_of

WIDTH, ROWS, TIGHT = 64, 128, 340_000
Json = Any


def layers() -> list[nn.Module]:
    with weights_of(3):
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


def by_memory(memory: float | None, driver: str) -> Json:
    """One step where it is recomputed as little as memory allows."""
    return _step(
        gpipe.GPipe(layers(), 2, 8, sample=batch(), costs=[1] * 6, remat="auto", memory=memory, seed=1, driver=driver)
    )


def by_plan(driver: str) -> Json:
    """One step by a plan for devices with little memory."""
    devices = [gpipe.Device(memory=TIGHT, flops=1e9)] * 2
    plan = gpipe.find_plan(layers(), batch(), devices, partitions=2, micro_batches=8)
    return _step(gpipe.GPipe(layers(), plan=plan, seed=1, driver=driver))


def auto(rank: int, world: int, memory: float | None) -> Json:
    return by_memory(memory, driver="process")


def planned(rank: int, world: int) -> Json:
    return by_plan(driver="process")


def _step(pipe: gpipe.GPipe) -> Json:
    with pipe:
        loss = pipe.step(batch(), batch(), mse_loss)
        gradients = {name: p.grad.tolist() for name, p in pipe.named_parameters() if p.grad is not None}
        return {"loss": loss.item(), "remat": list(pipe._settings.remat), "gradients": gradients}
