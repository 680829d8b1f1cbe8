"""Jobs that tell on which ports their rank listens."""

import os

import torch
import torch.distributed as dist

import gpipe
from tests.support.processes.listening import Listening, family, listening_sockets


def meet(rank: int, world: int) -> list[Listening]:
    """What listens once a process group has carried something."""
    dist.all_reduce(torch.zeros(1))
    dist.barrier()
    return listening_sockets(family(os.getpid()))


def train(rank: int, world: int) -> list[Listening]:
    """What listens while a pipe is in use."""
    layers = [torch.nn.Linear(4, 4) for _ in range(world)]
    pipe = gpipe.GPipe(layers, [1] * world, 2, seed=0, driver="process")
    pipe.step(torch.ones(4, 4), torch.ones(4, 4), torch.nn.functional.mse_loss)
    return listening_sockets(family(os.getpid()))


def meet_at_a_port(rank: int, world: int) -> list[Listening]:
    """The same with torch's own meeting place, a server at a port."""
    dist.init_process_group("gloo")
    return meet(rank, world)
