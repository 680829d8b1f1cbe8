"""A model over processes leaves the bits of one process and, where no parameter is tied, of the plain loop."""

from functools import cache
from typing import Any

import pytest
import torch

from gpipe.tracing.model import TracedModel
from tests.support.jobs import models as jobs
from tests.support.jobs.models import MICRO_BATCHES, SEED, piped, trained
from tests.support.open_models import TIED, UNET, batch_of, model_of
from tests.support.outcomes import Outcome, gradients, optimizer_of, state
from tests.support.plain_loop import one_thread, parts_of
from tests.support.processes.digests import Digests, digest, digests
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {"schedule": "1f1b", "remat": "never"}),
    "gpipe": (3, {}),
    "four": (4, {"schedule": "1f1b"}),
    "interleaved": (2, {"schedule": "interleaved", "stages_per_rank": 2, "remat": "never"}),
    "zb_v": (2, {"schedule": "zb_v"}),
    "dualpipe_v": (2, {"schedule": "dualpipe_v", "remat": "never"}),
}


@cache
def alone(name: str) -> tuple[Digests, Digests]:
    """What one process has."""
    with piped(model_of(name), name, 1, driver="lockstep") as pipe:
        found = digests(trained(pipe, name))
        return found, {key: digest(value) for key, value in pipe.state_dict().items()}


CASES = {
    "llama": ("1f1b", "interleaved"),
    "gpt2": ("gpipe", "zb_v"),
    "t5": ("four", "dualpipe_v"),
    "bert": ("four", "1f1b"),
    "unet": ("gpipe", "interleaved", "dualpipe_v"),
}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in CASES.items() for way in ways])
def test_the_bits_of_one_process(name: str, way: str, pool: WorkerPool) -> None:
    world, how = WAYS[way]
    expected, whole = alone(name)
    ranks = answers(pool.run(jobs.train, name, how, world=world))
    wrong = [
        f"{what} on rank {rank} is {one}, not {expected.get(what)}"
        for rank, (found, _) in enumerate(ranks)
        for what, one in found.items()
        if one != expected.get(what)
    ]
    assert not wrong, "\n".join(wrong)
    assert not expected.keys() - {what for found, _ in ranks for what in found}
    assert {key: one for _, state in ranks for key, one in state.items()} == whole
    held = [key for _, state in ranks for key in state]
    twice = {key for key in held if held.count(key) > 1}
    assert name in TIED or not twice, twice


@one_thread()
def plainly(name: str) -> Outcome:
    """Two steps of the loop that everybody writes, with the model itself."""
    found: Outcome = {}
    model = model_of(name)
    replayed = TracedModel(model, batch_of(name))
    optimizer = optimizer_of(model)
    for step in (0, 1):
        given = batch_of(name, step, length=12 - step)
        share = 1 / MICRO_BATCHES if name == UNET else 1.0
        counts = {} if name == UNET else {"num_items_in_batch": (given["labels"][:, 1:] != -100).sum()}
        losses = []
        for m, part in enumerate(parts_of(given, MICRO_BATCHES)):
            with replayed.rng_scope(SEED, step, m):
                output = model(**part, **counts)  # type: ignore[arg-type]  # a dict
            losses.append(output["loss"].detach())
            output["loss"].backward(torch.tensor(share))
        found[f"{step} loss"] = sum(loss * share for loss in losses)
        found |= gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
        found |= state(model, step)
    return found


@pytest.mark.parametrize("name", ["llama", "unet"])
def test_the_bits_of_the_plain_loop(name: str) -> None:
    found, _ = alone(name)
    assert not [what for what, one in digests(plainly(name)).items() if found[what] != one]
