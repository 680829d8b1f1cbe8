"""A DataLoader with a worker makes the next mini-batch while a step runs, and changes no result."""

import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, RandomSampler

import gpipe

WAIT = 60.0  # seconds until a test that would hang fails


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Rows with noise that depends on the row. Sets an event when the first row of mini-batch 1 is read."""

    def __init__(self, made: Any = None) -> None:
        self.made, self.read = made, 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        if self.made is not None and self.read > 8:
            self.made.set()
        noise = torch.randn(4, generator=torch.Generator().manual_seed(row))
        return noise + row / 24, noise[:2]


class Waits(nn.Module):
    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made, self.found = made, list[bool]()

    def forward(self, rows: Tensor) -> Tensor:
        self.found.append(self.made.wait(WAIT))
        return rows * 1


def trained(**loading: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)]
    order = torch.Generator().manual_seed(1)
    data = Augmented()
    loader = DataLoader(data, 8, sampler=RandomSampler(data, generator=order), **loading)
    with gpipe.GPipe(layers, 2, 4, seed=0) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        losses = []
        for _ in range(2):
            for rows, targets in loader:
                losses.append(pipe.step(rows, targets, mse_loss))
                optimizer.step()
                optimizer.zero_grad()
        return losses, pipe.state_dict()


@pytest.mark.parametrize("loading", [{"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_workers_change_no_bit(loading: dict[str, Any]) -> None:
    (losses, state), (expected, weights) = trained(**loading), trained()
    assert len(losses) == 6
    assert all(map(torch.equal, losses, expected))
    assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_the_next_mini_batch_is_made_while_a_step_runs() -> None:
    made = multiprocessing.Event()
    waits = Waits(made)
    batches = iter(DataLoader(Augmented(made), 8, num_workers=1))
    with gpipe.GPipe([waits, nn.Linear(4, 2)], 2, 4, remat="never") as pipe:
        rows, targets = next(batches)
        pipe.step(rows, targets, mse_loss)
    assert waits.found
    assert all(waits.found)
