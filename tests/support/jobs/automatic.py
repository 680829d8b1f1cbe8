"""Jobs whose rematerialization or whole plan is found for them."""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import gpipe
from gpipe.planner.search import table_search
from gpipe.schedule.action import COMPUTE
from tests.support.plain_loop import weights_of
from tests.support.planned import pipe_by_costs

WIDTH, ROWS, TIGHT = 64, 128, 340_000
Json = Any


def layers(dropout: float = 0.1) -> list[nn.Module]:
    with weights_of(3):
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(6)]


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


def by_memory(memory: float | None, driver: str) -> Json:
    """One step where it is recomputed as little as memory allows."""
    return _step(
        pipe_by_costs(
            layers(), 2, 8, sample=batch(), costs=[1] * 6, remat=gpipe.Remat(memory=memory), seed=1, driver=driver
        )
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


def searched(rank: int, world: int) -> Json:
    """One step by a table that is searched for, by seconds that rank 0 alone has measured; and what was found."""
    return _searched(layers(), driver="process")


def searched_by_replicas(rank: int, world: int, built: bool) -> Json:
    """The same of two replicas with the same rows; of what builds layers no seconds are measured."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "pp"))
    if built:
        return _searched(layers(dropout=0.0), mesh=mesh)
    makers, devices = [partial(_layer, at) for at in range(6)], [gpipe.Device(memory=TIGHT, flops=1.0)] * 2
    how: Any = {"micro_batches": 8, "schedule": "auto", "costs": "params"}
    with patch.object(table_search, "MAX_LISTED", 20_000):
        plan = gpipe.find_plan(makers, batch(), devices, **how)
    return _told(gpipe.GPipe(makers, plan=plan, seed=1, mesh=mesh))


def _layer(at: int) -> nn.Module:
    return layers(dropout=0.0)[at]


def _searched(model: Any, **options: Any) -> Json:
    with patch.object(table_search, "MAX_LISTED", 20_000):
        pipe = gpipe.GPipe(
            model, 2, 8, sample=batch(), schedule="auto", seed=1, remat=gpipe.Remat(memory=TIGHT), **options
        )
    return _told(pipe)


def _told(pipe: gpipe.GPipe) -> Json:
    found = [pipe.program.only(COMPUTE).to_text(), list(pipe.layers_per_partition)]
    return {**_step(pipe), "found": found}


def whole(dropout: float = 0.1) -> Json:
    """The same step in one process on one rank."""
    return _step(gpipe.GPipe(layers(dropout), 1, 8, seed=1))


def _step(pipe: gpipe.GPipe) -> Json:
    with pipe:
        loss = pipe.step(batch(), batch(), mse_loss)
        gradients = {name: p.grad.tolist() for name, p in pipe.named_parameters() if p.grad is not None}
        return {"loss": loss.item(), "remat": list(pipe.plan.remat), "gradients": gradients}
