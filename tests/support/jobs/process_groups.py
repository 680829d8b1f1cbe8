"""Other jobs with tensors sent as between GPUs: over process groups, here gloo's, and not over the links."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.distributed.mesh import Position
from gpipe.distributed.nccl import NcclGroups

Json = Any


@contextmanager
def wired(*, grouped: bool = True) -> Iterator[None]:
    """Has pipes treat the tensors of this CPU as those of a GPU, with process groups or without."""

    def groups(position: Position, crossings: Iterable[tuple[int, int]], *, plain: bool) -> NcclGroups:
        return NcclGroups(position, crossings, "gloo" if grouped and plain else None)

    with mock.patch("gpipe.distributed.processes.groups_for", groups):
        yield


def over_wires(rank: int, world: int, grouped: bool, module: str, name: str, *args: Any) -> Json:
    with wired(grouped=grouped):
        return getattr(import_module(f"tests.support.jobs.{module}"), name)(rank, world, *args)


def count(rank: int, world: int) -> Json:
    sends, receives = [], []

    def sent(tensor: Tensor, *args: Any, **how: Any) -> Any:
        sends.append(tensor.numel())
        return isend(tensor, *args, **how)

    def received(tensor: Tensor, *args: Any, **how: Any) -> Any:
        receives.append(tensor.numel())
        return irecv(tensor, *args, **how)

    isend, irecv = dist.isend, dist.irecv
    with wired(), mock.patch.object(dist, "isend", sent), mock.patch.object(dist, "irecv", received):
        pipe = gpipe.GPipe([nn.Linear(6, 6) for _ in range(4)], world, 4, driver="process")
        pipe.step(torch.ones(4, 6), torch.ones(4, 6), F.mse_loss)
        pipe.close()
    return [sends, receives]
