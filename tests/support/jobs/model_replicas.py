"""Jobs on replicas of a model, whose mini-batches have different numbers of labels."""

from typing import Any

import torch
from torch import Tensor

import gpipe
from tests.support.jobs.models import piped, stepped
from tests.support.open_models import batch_of, model_of
from tests.support.outcomes import Outcome
from tests.support.said import said

MICRO_BATCHES = 2  # of each replica
SIZES = ((4, 12), (2, 7))
"""Rows and length of the mini-batch of each replica; of ready-made micro-batches those of each."""


def mini_batch(name: str, replica: int, step: int, *, ready_made: bool) -> Any:
    """What a replica is given: words of different lengths, so that labels are not as many as rows."""
    if not ready_made:
        return share(name, replica, step)
    return gpipe.MicroBatches([share(name, replica, step, at) for at in range(MICRO_BATCHES)])


def share(name: str, replica: int, step: int, at: int = 0) -> dict[str, Tensor]:
    rows, length = SIZES[replica]
    given = batch_of(name, 10 * step + 2 * replica + at, rows - at, length - at)
    if "input_ids" in given:
        given["labels"] = given["labels"].clone()
        given["labels"][0, : 3 + replica] = -100
    return given


def parts(name: str, step: int, *, ready_made: bool) -> gpipe.MicroBatches:
    found = []
    for replica in range(len(SIZES)):
        given = mini_batch(name, replica, step, ready_made=ready_made)
        if ready_made:
            found += list(given)
        else:
            rows = len(given["labels"])
            cut = [rows - rows // MICRO_BATCHES, rows // MICRO_BATCHES]
            for at in range(MICRO_BATCHES):
                found.append({key: value.split(cut)[at] for key, value in given.items()})
    return gpipe.MicroBatches(found)


def train(rank: int, world: int, name: str, ready_made: bool, schedule: str) -> dict[str, Any]:
    given = [mini_batch(name, rank // 2, step, ready_made=ready_made) for step in (0, 1)]
    how: Any = {"driver": "process", "schedule": schedule}
    with piped(model_of(name), name, 2, micro_batches=MICRO_BATCHES, **how) as pipe:
        return {what: value.tolist() for what, value in stepped(pipe, given).items() if value is not None}


def alone(name: str, *, ready_made: bool) -> Outcome:
    """What one pipe leaves that is given the micro-batches of both."""
    given = [parts(name, step, ready_made=ready_made) for step in (0, 1)]
    with piped(model_of(name), name, 1, micro_batches=2 * MICRO_BATCHES, driver="lockstep") as pipe:
        return stepped(pipe, given)


def uncounted(rank: int, world: int) -> str:
    """A step in which a replica has no label that counts, and one in which none has."""
    with piped(model_of("llama"), "llama", 2, micro_batches=MICRO_BATCHES, driver="process") as pipe:
        given = mini_batch("llama", rank // 2, 0, ready_made=False)
        nothing = {**given, "labels": torch.full_like(given["labels"], -100)}
        assert pipe.step(nothing if rank // 2 else given).isfinite()
        return said(lambda: pipe.step(nothing))
