"""Models too big to build whole: each process builds its own layers, with the weights that one device would have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.stages.sequence import build
from tests.support.jobs.too_big import limited
from tests.support.processes.digests import digest
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers, told_by

WIDTH, LAYERS, SEED = 2048, 24, 9
LAYER = 4 * WIDTH * (WIDTH + 1)  # bytes
ROOM = 20 * LAYER  # bytes: six layers with their gradients and one gradient more take 13; threads' stacks count too
Json = Any


def makers(width: int = WIDTH) -> list[Callable[[], nn.Module]]:
    """24 layers of 16 MiB each."""
    return [lambda: nn.Linear(width, width)] * LAYERS


def build_in_little_memory(rank: int, world: int) -> Json:
    """Builds and trains a model that does not fit; says so, and the digests of its weights before.

    Each rank needs memory for the weights and the gradients of six layers; the whole model has 24.
    """
    with gpipe.GPipe(makers(4), world, 2, driver="process") as small:  # whatever torch takes by itself at first
        small.step(torch.ones(2, 4), torch.ones(2, 4), F.mse_loss)
    with limited(ROOM):
        pipe = gpipe.GPipe(makers(), world, 2, seed=SEED, driver="process")
        digests = {name: digest(parameter) for name, parameter in pipe.named_parameters()}
        pipe.step(torch.ones(2, WIDTH), torch.zeros(2, WIDTH), F.mse_loss)
        pipe.close()
        del pipe
        refused = False
        try:
            whole = [make() for make in makers()]
            del whole
        except (RuntimeError, MemoryError):
            refused = True
    return [refused, digests]


def draws_around(rank: int, world: int) -> Json:
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    gpipe.GPipe(makers(4), world, 2, seed=SEED, driver="process").close()
    return bool(torch.equal(before, torch.get_rng_state()))


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        if self.weight.device.type != "meta":
            raise ZeroDivisionError("no weights today")

    def forward(self, x: Tensor) -> Tensor:
        return x


def fails_on_one(rank: int, world: int, index: int) -> None:
    layers: list[Any] = makers(4)
    layers[index] = Fails
    gpipe.GPipe(layers, world, 2, seed=SEED, driver="process")


def test_four_processes_build_and_train_what_none_could_build() -> None:
    assert ROOM < LAYERS * LAYER
    found = answers(run_ranks(4, build_in_little_memory))  # fresh: memory that a job has freed is room
    if not any(refused for refused, _ in found):
        pytest.skip("this kernel does not limit a process's memory")
    assert all(refused for refused, _ in found), "the whole model fits into the memory of some rank"
    weights = {name: digest for _, digests in found for name, digest in digests.items()}
    assert sum(len(digests) for _, digests in found) == len(weights) == 2 * LAYERS
    for index, make in enumerate(makers()):
        layer = build(make, SEED, index)  # one at a time
        assert isinstance(layer, nn.Module)
        for name, parameter in layer.named_parameters():
            assert weights[f"{index}.{name}"] == digest(parameter)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_building_leaves_the_generators_of_all_processes_alone(world: int, pool: WorkerPool) -> None:
    assert answers(pool.run(draws_around, world=world)) == [True] * world


@pytest.mark.parametrize("index", [0, 13, 23])
def test_a_callable_that_fails_on_one_process_is_named_on_all(index: int, pool: WorkerPool) -> None:
    outcomes = pool.run(fails_on_one, index)
    owner = index * 4 // LAYERS
    for outcome in outcomes:
        assert outcome.error == ("ZeroDivisionError" if outcome.rank == owner else "RemoteError"), told_by(outcomes)
        assert "no weights today" in outcome.told
        assert outcome.rank == owner or f"rank {owner}" in outcome.told
        assert f"while building layer {index}" in outcome.told
