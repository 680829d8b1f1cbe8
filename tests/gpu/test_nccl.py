"""Losses and weights of one process per GPU with NCCL are bitwise identical to those of one GPU."""

import pytest
import torch

import gpipe
from tests.support.jobs import nccl as jobs
from tests.support.processes.launch import run_ranks
from tests.support.processes.outcome import answers

pytestmark = pytest.mark.gpu


def needs(gpus: int) -> pytest.MarkDecorator:
    """Skips a test if there are fewer devices."""
    return pytest.mark.skipif(torch.cuda.device_count() < gpus, reason=f"needs {gpus} CUDA devices")


@pytest.mark.parametrize("world", [pytest.param(world, marks=needs(world)) for world in (1, 2, 4)])
def test_stages_on_gpus_of_their_own_train_to_the_bits_of_one(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    alone = gpipe.GPipe(jobs.network(), 1, jobs.MICRO_BATCHES, devices="cuda:0", seed=jobs.SEED, driver="lockstep")
    torch.use_deterministic_algorithms(True)
    try:
        losses, whole = jobs.train_pipe(alone, jobs.data)
    finally:
        torch.use_deterministic_algorithms(False)
    found = answers(run_ranks(world, jobs.train, world, join=False))
    assert all(told == losses for told, _ in found)
    assert {name: total for _, own in found for name, total in own.items()} == whole


@needs(2)
def test_replicas_on_two_gpus_stay_the_same() -> None:
    one, other = answers(run_ranks(2, jobs.train, 1, join=False))
    assert one == other
