"""Jobs that record what crosses between processes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.processes import Processes
from gpipe.schedule.action import TRANSFERS
from tests.support.plain_loop import weights_of
from tests.support.planned import staged

MICRO_BATCHES, STEPS = 4, 2
WIDTHS = (3, 5, 7, 11, 13, 17, 19)
"""Of what goes into each stage, and out of the last: no two alike."""

Json = dict[str, Any]


def wide_and_narrow(stages: int) -> list[nn.Module]:
    with weights_of(1):
        return [nn.Linear(WIDTHS[stage], WIDTHS[stage + 1]) for stage in range(stages)]


def train(rank: int, world: int, stages: Sequence[int], schedule: str, rows: Sequence[int], file: str) -> Json:
    """Records steps, of so many rows in each replica; one rank writes what crossed.

    Gives what it says, the transfers of the program, and the bytes of the gradients of each stage of this rank.
    """
    layers = wide_and_narrow(sum(stages))
    ranks = world // len(rows)
    per_rank = sum(stages) // ranks
    own = rows[rank // ranks]
    x, y = torch.ones(own, WIDTHS[0]), torch.ones(own, WIDTHS[sum(stages)])
    how: Any = {"schedule": staged(schedule, per_rank), "driver": "process"}
    with gpipe.GPipe(layers, list(stages), MICRO_BATCHES, **how) as pipe, gpipe.record(pipe) as recording:
        for _ in range(STEPS):
            pipe.zero_grad()
            pipe.step(x, y, mse_loss)
        if rank == 0:
            recording.save(file)
        return {
            "messages": len(recording.messages()),
            "placement": pipe.program.rank_of,
            "transfers": [[str(action) for action in row if action.kind in TRANSFERS] for row in pipe.program.table],
            "gradients": sum(p.grad.nbytes for p in pipe.parameters() if p.grad is not None),
        }


def train_remotely(rank: int, world: int, *args: Any) -> Json:
    """Likewise, as if each process had a host of its own: by TCP, with clocks compared by what was done."""
    host: Any = {"return_value": f"host {rank}"}
    with (
        mock.patch("gpipe.distributed.context.host_name", **host),
        mock.patch("gpipe.distributed.rendezvous.host_name", **host),
        mock.patch("gpipe.distributed.linking.own_host", return_value="127.0.0.1"),
    ):
        return train(rank, world, *args)


class Tied(nn.Module):
    """A layer with BatchNorm, whose weight others have too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, value: Tensor) -> Tensor:
        return self.norm(self.linear(value))


def train_tied(rank: int, world: int, **how: Any) -> list[Json]:
    """Records a step and a call of two stages with a weight in common, in two replicas."""
    with weights_of(2):
        first, last = Tied(), Tied()
    last.linear.weight = first.linear.weight
    x = torch.randn(8, 6)
    with gpipe.GPipe([first, last], 2, 2, driver="process", **how) as pipe, gpipe.record(pipe) as recording:
        pipe.step(x, x, mse_loss)
        pipe(x, gather=True).sum().backward()
        return [asdict(message) for message in recording.messages()]


def train_synced(rank: int, world: int) -> list[Json]:
    return train_tied(rank, world, batch_norm="synchronized")


def train_deferred(rank: int, world: int) -> list[Json]:
    return train_tied(rank, world, batch_norm="deferred")


def linked(pipe: gpipe.GPipe) -> Endpoint:
    assert isinstance(pipe._processes, Processes)
    return pipe._processes.linked()


def note_unrecorded(rank: int, world: int) -> Any:
    """What a process has noted of a step behind a recorded one."""
    x = torch.ones(8, WIDTHS[0])
    with gpipe.GPipe(wide_and_narrow(2), 2, MICRO_BATCHES, driver="process") as pipe:
        with gpipe.record(pipe):
            pipe.step(x, torch.ones(8, WIDTHS[2]), mse_loss)
        noted = [linked(pipe).crossings is None]
        pipe.step(x, torch.ones(8, WIDTHS[2]), mse_loss)
        return [*noted, linked(pipe).crossings is None]
