"""Who walks the rows where the user did not say: rank threads, or for very short layers the calling thread."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.run import run
from gpipe.run.pace import SHORT, TRIALS, Pace


def paced(threads: float, alone: float) -> Pace:
    pace = Pace()
    for _ in range(TRIALS):
        pace.note(threads, threaded=True)
        pace.note(alone, threaded=False)
    return pace


def test_threads_walk_the_rows_unless_layers_are_very_short() -> None:
    assert Pace().threaded
    assert paced(threads=2 * SHORT, alone=SHORT).threaded


def test_of_two_ways_to_run_short_layers_the_faster_is_kept() -> None:
    assert paced(threads=SHORT / 2, alone=SHORT).threaded
    assert not paced(threads=SHORT / 2, alone=SHORT / 4).threaded


def test_one_bad_try_is_enough() -> None:
    pace = Pace()
    for _ in range(TRIALS):
        pace.note(SHORT / 2, threaded=True)
    assert not pace.threaded
    pace.note(SHORT * 4, threaded=False)
    assert pace.threaded


class Where(nn.Module):
    """Notes the threads that it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.threads: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.threads.append(threading.current_thread().name)
        return torch.dropout(self.linear(x), 0.5, self.training)


class NoTime:
    """Stands for the module `time`: nothing takes any, however busy the machine is."""

    def perf_counter(self) -> float:
        return 0.0


def test_short_layers_are_tried_in_the_calling_thread_and_train_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "time", NoTime())
    torch.manual_seed(0)
    layers = [Where(), Where()]
    pipe = gpipe.GPipe(layers, 2, 2, seed=1)
    other = gpipe.GPipe(copy.deepcopy(layers), 2, 2, seed=1, driver="threads")
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for plumbing in (pipe._engine.plumbing(2, trains=True),):
        for _ in range(TRIALS):
            plumbing.pace.note(SHORT / 2, threaded=True)
    for _ in range(3):
        assert torch.equal(pipe.step(x, y, F.mse_loss), other.step(x, y, F.mse_loss))
    assert set(layers[0].threads) == {threading.current_thread().name}
    for ours, theirs in zip(pipe.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
