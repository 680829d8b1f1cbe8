"""Models too big to build whole: each process builds its own layers, with the weights that one device would have."""

import pytest
from torch import nn

from gpipe.stages.sequence import build
from tests.support.jobs import lazy as jobs
from tests.support.jobs.lazy import LAYER, LAYERS, ROOM, SEED, makers
from tests.support.processes.digests import digest
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers, told_by


def test_four_processes_build_and_train_what_none_could_build() -> None:
    assert ROOM < LAYERS * LAYER
    found = answers(run_ranks(4, jobs.build_in_little_memory))  # fresh: memory that a job has freed is room
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
