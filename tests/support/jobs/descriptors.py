"""Jobs that find what a process opens and starts for a pipe."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import gpipe
from tests.support.jobs.apart import apart
from tests.support.plain_loop import weights_of

Json = tuple[int, int, int]
Job = Callable[[int, int], Json]


def opened(rank: int, world: int) -> Json:
    """How many descriptors and threads a pipe and its first step add, and how many stay when the pipe is closed."""
    before = _open() | _running()
    with weights_of(1):
        layers = [nn.Linear(3, 3) for _ in range(world)]
    with gpipe.GPipe(layers, world, 2, driver="process", seed=0) as pipe:
        pipe.step(torch.ones(4, 3), torch.ones(4, 3), mse_loss)
        descriptors, threads = _open() - before, _running() - before
        dist.barrier()  # the thread ends with the connections, which the others close
    stay = (_open() | _running()) & (descriptors | threads)
    return len(descriptors), len(threads), len(stay)


def opened_apart(rank: int, world: int) -> Json:
    """Likewise, if each rank has a host of its own."""
    with apart(rank, {}):
        return opened(rank, world)


def _open() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder itself
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def _running() -> set[str]:
    return {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}
