"""Jobs with ready-made micro-batches, in two replicas of a pipe of two stages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import gpipe
from tests.support.jobs.data_parallel import gradients, normalized
from tests.support.jobs.training import Json
from tests.support.networks import network
from tests.support.plain_loop import squares
from tests.support.said import said

MOST, SEED, WIDTH = 3, 7, 6
SIZES = ([(3, 2), (1, 5)], [(2, 1), (4, 2), (1, 3)])
"""The rows and the length of each micro-batch, of each replica."""


def data(sizes: Sequence[Sequence[int]], seed: int) -> gpipe.MicroBatches:
    generator = torch.Generator().manual_seed(seed)
    return gpipe.MicroBatches([torch.randn(*size, WIDTH, generator=generator) for size in sizes])


def loss_of(replica: int, outputs: Sequence[Tensor]) -> Tensor:
    """A loss of some of the outputs: each replica leaves out another."""
    return sum((out.sum() for m, out in enumerate(outputs) if m != replica), torch.zeros(()))


def train(rank: int, world: int, how: dict[str, Any]) -> Json:
    replica = rank // 2
    with gpipe.GPipe(network(), 2, MOST, seed=SEED, driver="process", **how) as pipe:
        inputs = data(SIZES[replica], replica) if pipe.reads_inputs else None
        targets = data(SIZES[replica], 2 + replica) if pipe.reads_targets else None
        loss = pipe.step(inputs, targets, squares)
        trained = gradients(pipe)
        pipe.zero_grad()
        with torch.no_grad():
            validated = pipe.step(inputs, targets, squares)
            some = pipe(inputs)
        outputs = pipe(inputs, gather=True)
        loss_of(replica, outputs).backward()
        return {
            "loss": loss.item(),
            "gradients": trained,
            "validated": validated.item(),
            "evaluated": None if some is None else [output.tolist() for output in some],
            "outputs": [output.tolist() for output in outputs],
            "later": gradients(pipe),
        }


def normalize(rank: int, world: int, rows: Sequence[Sequence[int]]) -> Json:
    """A call whose BatchNorms normalize over replicas, each of which leaves out one of the outputs."""
    replica = rank // 2
    how: Any = {"seed": SEED, "driver": "process", "batch_norm": "synchronized"}
    with gpipe.GPipe(normalized(), [4, 3], MOST, **how) as pipe:
        inputs = data([[n] for n in rows[replica]], replica)
        loss_of(replica, pipe(inputs, gather=True)).backward()
        return gradients(pipe)


def mistake(rank: int, world: int, counts: Sequence[int | None]) -> Json:
    """A step whose inputs and targets are so many micro-batches, or None, and the next one; gives the refusal."""
    given = [torch.ones(4, WIDTH) if n is None else data([(1, 2)] * n, 0) for n in counts]
    with gpipe.GPipe(network(), 2, MOST, seed=SEED, driver="process") as pipe:
        inputs, targets = given[0] if pipe.reads_inputs else None, given[1] if pipe.reads_targets else None
        told = said(lambda: pipe.step(inputs, targets, squares))
        both = data([(1, 2)] * 2, 0)
        return [told, pipe.step(both, both, squares).isfinite().item()]
