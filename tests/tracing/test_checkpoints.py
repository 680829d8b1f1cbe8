"""A pipe of a model is saved, and gone on from to the same bits with another number of partitions."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(3))
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = value = self.into(x)
        for block in self.blocks:
            value = value + block(value).tanh()
        return self.out(value + first)


def build(partitions: int, seed: int) -> tuple[gpipe.GPipe, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    pipe = gpipe.GPipe(Model(), partitions, 2, sample=torch.ones(4, 4), costs="params", seed=seed)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.01)


def train(pipe: gpipe.GPipe, optimizer: torch.optim.Optimizer) -> Tensor:
    inputs = torch.arange(16.0).reshape(4, 4) / 16
    loss: Tensor = pipe.step(inputs, inputs.flip(0), mse_loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_training_goes_on_to_the_same_bits_with_other_partitions(tmp_path: Path) -> None:
    pipe, optimizer = build(2, seed=1)
    train(pipe, optimizer)
    gpipe.save(tmp_path, pipe, optimizer)
    expected = [train(pipe, optimizer) for _ in range(2)]
    other, another = build(3, seed=2)
    gpipe.load(tmp_path, other, another)
    assert [float(train(other, another)) for _ in range(2)] == [float(loss) for loss in expected]
    for name, value in pipe.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
