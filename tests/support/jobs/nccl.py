"""What each process with a GPU of its own does; what it leaves, as digests."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gpipe

ROWS, WIDTH, MICRO_BATCHES, STEPS, SEED = 32, 64, 4, 3, 7


def network() -> list[nn.Module]:
    torch.manual_seed(5)
    return [
        layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout())
    ]


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return made[0], made[1]


def train_pipe(pipe: gpipe.GPipe, batch_of: Callable[[int], Sequence[torch.Tensor]]) -> tuple[list[str], Any]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch_of(step)
        losses.append(bits(pipe.step(x.cuda(), y.cuda(), F.mse_loss)))
        optimizer.step()
    return losses, {name: bits(parameter.detach().double().sum()) for name, parameter in pipe.named_parameters()}


def bits(tensor: torch.Tensor) -> str:
    return float(tensor.detach()).hex()


def train(rank: int, world: int, stages: int) -> Any:
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
    pipe = gpipe.GPipe(network(), stages, MICRO_BATCHES, seed=SEED, driver="process")
    replica, replicas = rank // stages, world // stages
    found = train_pipe(pipe, lambda step: [part.tensor_split(replicas)[replica] for part in data(step)])
    pipe.close()
    dist.destroy_process_group()
    return found
