"""Containers whose methods raise, as in the attributes of e3nn's layers: what cannot be read is left alone."""

from collections.abc import Callable
from typing import Any, Never

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import weights_of
from tests.support.planned import pipe_by_costs

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def fails(*_: object) -> Never:
    raise NotImplementedError


class Pair(tuple[Any, ...]):
    """As `MulIr` of e3nn."""

    __len__ = fails


class Listed(list[Any]):
    __iter__ = fails


class Items(dict[str, Any]):
    items = fails


class Views(dict[str, Any]):
    keys = values = __iter__ = __len__ = fails


class Lazy:
    def __getattr__(self, name: str) -> Never:
        raise RuntimeError(name)


MADE: dict[str, Callable[[], object]] = {
    "a tuple without a length": lambda: Pair((1, "0e")),
    "in a tuple": lambda: (Pair((1, "0e")),),
    "a list that is not iterated over": lambda: Listed([1]),
    "a dict without items": lambda: Items(a=1),
    "a dict without views": lambda: Views(a=1),
    "attributes that raise": Lazy,
    "in a dict in a list": lambda: [{"a": Listed([1])}, Items(a=1)],
}


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: tuple[Tensor, object]) -> Tensor:
        x: Tensor = self.linear(given[0])
        return x


class Model(nn.Module):
    def __init__(self, odd: Callable[[], object], where: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.between = nn.Tanh()
        holders = {"a block": self.blocks[1], "a module between blocks": self.between, "the model": self}
        vars(holders[where])["odd"] = odd()

    def forward(self, x: Tensor, odd: object = None) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x


def loss_of(output: Tensor, target: tuple[Tensor, object]) -> Tensor:
    return F.mse_loss(output, target[0])


@pytest.mark.parametrize("name", MADE)
def test_they_may_be_among_inputs_and_targets(name: str) -> None:
    odd = MADE[name]()
    with weights_of(2):
        layers = [First(), nn.Linear(4, 4)]
    pipe = gpipe.GPipe(layers, 2, 2)
    expected = sum(F.mse_loss(nn.Sequential(*layers)((X[r], odd)), Y[r]) * 0.5 for r in (slice(4), slice(4, 8)))
    assert torch.equal(pipe.step((X, odd), (Y, odd), loss_of), torch.as_tensor(expected))


@pytest.mark.parametrize("where", ["a block", "a module between blocks", "the model"])
@pytest.mark.parametrize("name", MADE)
def test_they_may_be_attributes_and_arguments_of_a_model(name: str, where: str) -> None:
    with weights_of(2):
        model = Model(MADE[name], where).eval()
    sample = {"x": X, "odd": MADE[name]()}
    pipe = pipe_by_costs(model, 2, 2, sample=sample, costs="params")
    with torch.no_grad():
        assert torch.equal(pipe(**sample), torch.cat([model(X[:4]), model(X[4:])]))
