"""The first step is verified over processes too: all raise what one finds, and none waits for one that is lost."""

import ctypes
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.planned import pipe_by_costs
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers

M = 4


class Writes(nn.Module):
    """Writes its input without PyTorch noticing."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.clamp_(-0.2, 0.2)
        return x * 2


class Dies(nn.Module):
    """Ends its process when it is called for the first time after the step: in the replay."""

    calls = ctypes.c_long()  # which a replay does not put back

    def forward(self, x: Tensor) -> Tensor:
        self.calls.value += 1
        if self.calls.value > M:
            os._exit(7)
        return x * 2


def network(inner: nn.Module) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), inner, nn.Linear(4, 4)]


def outcomes(pipe: gpipe.GPipe, steps: int = 2) -> list[Any]:
    torch.manual_seed(1)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    found: list[Any] = []
    for _ in range(steps):
        pipe.zero_grad()
        try:
            found.append(pipe.step(x, y, F.mse_loss).item())
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def verified(rank: int, world: int, how: dict[str, Any]) -> Any:
    pipe = pipe_by_costs(network(nn.Dropout(0.2)), [3, 2], M, driver="process", costs="params", seed=0, **how)
    return outcomes(pipe), pipe._verifier.compared, pipe._verifier.findings


def writes(rank: int, world: int) -> Any:
    pipe = gpipe.GPipe(network(Writes()), [3, 2], M, driver="process", remat="never")
    return outcomes(pipe)


class Averages(nn.Module):
    """Subtracts a moving average, which it keeps in a buffer."""

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.average: Tensor
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        new = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.average = new if self.replaces else self.average.copy_(new)
        return x - new


def averages_twice(rank: int, world: int, partitions: list[int], replaces: bool) -> Any:
    shared = Averages(replaces=replaces)
    layers = [shared, nn.Linear(4, 4), shared, nn.Linear(4, 4)]
    for parameter in layers[1].parameters(), layers[3].parameters():
        torch.nn.utils.vector_to_parameters(torch.arange(20.0) / 20, parameter)
    return outcomes(gpipe.GPipe(layers, partitions, M, driver="process"))


def dies(rank: int, world: int) -> None:
    pipe = gpipe.GPipe(network(Dies()), [3, 2], M, driver="process", remat="never")
    pipe.step(torch.randn(8, 4), torch.randn(8, 4), F.mse_loss)


@pytest.mark.parametrize("how", [{}, {"batch_norm": "synchronized"}, {"batch_norm": "deferred"}], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_stages_and_replicas_are_verified(world: int, how: dict[str, Any], pool: WorkerPool) -> None:
    for losses, compared, findings in answers(pool.run(verified, how, world=world)):
        assert all(isinstance(loss, float) for loss in losses)
        assert compared > 0
        assert findings == []


def test_what_one_process_finds_all_raise(pool: WorkerPool) -> None:
    first, last = answers(pool.run(writes, world=2))
    assert last[0].startswith("VerificationError: stage 1")
    assert first[0].startswith("RemoteError")
    assert "VerificationError" in first[0]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_buffer_that_two_processes_change_is_found(replaces: bool, pool: WorkerPool) -> None:
    """Bug story: each process updated its own copy, and the step returned a wrong loss."""
    for found in answers(pool.run(averages_twice, [2, 2], replaces, world=2)):
        assert "[buffer-in-several-processes]" in found[0]
    for found in answers(pool.run(averages_twice, [3, 1], replaces, world=2)):
        assert all(isinstance(loss, float) for loss in found)


def test_a_rank_that_is_lost_in_a_replay_is_missed() -> None:
    first = next(outcome for outcome in run_ranks(2, dies) if outcome.rank == 0)
    assert (first.error, first.hung) == ("RemoteError", False)
