"""Models too big to build whole: each process builds its own layers, with the weights that one device would have."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe.stages.sequence import build
from tests.support.jobs import lazy as jobs
from tests.support.jobs.lazy import LAYER, LAYERS, ROOM, SEED, WIDTH, makers
from tests.support.plain_loop import one_thread, run_layers
from tests.support.processes.digests import digest
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers, told_by


def test_four_processes_build_and_train_what_none_could_build() -> None:
    assert ROOM < LAYERS * LAYER
    found = answers(run_ranks(4, jobs.build_in_little_memory))  # fresh: memory that a job has freed is room
    if not any(refused for refused, *_ in found):
        pytest.skip("this kernel does not limit a process's memory")
    assert all(refused for refused, *_ in found), "the whole model fits into the memory of some rank"
    weights = {name: digest for _, _, digests, _ in found for name, digest in digests.items()}
    assert sum(len(digests) for _, _, digests, _ in found) == len(weights) == 2 * LAYERS
    for index, make in enumerate(makers()):
        layer = build(make, SEED, index)  # one at a time
        assert isinstance(layer, nn.Module)
        for name, parameter in layer.named_parameters():
            assert weights[f"{index}.{name}"] == digest(parameter)


def test_its_loss_is_that_of_one_device(pool: WorkerPool) -> None:
    (loss,) = {loss for _, loss, _, _ in answers(pool.run(jobs.build_in_little_memory))}
    total = torch.zeros(())
    with one_thread(), torch.no_grad():
        for m in range(2):
            value: object = torch.ones(1, WIDTH)
            for index, make in enumerate(makers()):
                layer = build(make, SEED, index)
                assert isinstance(layer, nn.Module)
                value = run_layers([layer], value, seed=SEED, step=0, micro_batch=m)
            assert isinstance(value, torch.Tensor)
            total = total + F.mse_loss(value, torch.zeros(1, WIDTH)) * 0.5
    assert loss == digest(total)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_building_leaves_the_generators_of_all_processes_alone(world: int, pool: WorkerPool) -> None:
    assert answers(pool.run(jobs.draws_around, world=world)) == [True] * world


@pytest.mark.parametrize("index", [0, 13, 23])
def test_a_callable_that_fails_on_one_process_is_named_on_all(index: int, pool: WorkerPool) -> None:
    outcomes = pool.run(jobs.fails_on_one, index)
    owner = index * 4 // LAYERS
    for outcome in outcomes:
        assert outcome.error == ("ZeroDivisionError" if outcome.rank == owner else "RemoteError"), told_by(outcomes)
        assert "no weights today" in outcome.told
        assert outcome.rank == owner or f"rank {owner}" in outcome.told
        assert f"while layer {index} was built" in outcome.told
