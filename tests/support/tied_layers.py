"""Layers that share weights in every way, and a mini-batch for them."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import gpipe
from tests.support import plain_loop as laws
from tests.support.odd_layers import OfPairs
from tests.support.plain_loop import mini_batch
from tests.support.shared_weights import lent

M = 3
W = 4
Build = Callable[[], list[nn.Module]]


def use_one(*modules: nn.Module, name: str = "weight") -> None:
    """Makes the parameters of this name one."""
    for module in modules[1:]:
        setattr(module, name, getattr(modules[0], name))


def two_uses() -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W), nn.Linear(W, W)]
    use_one(layers[0], layers[3])
    return layers


def three_uses() -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(W, W), nn.Linear(W, W), nn.Dropout(0.2), nn.Linear(W, W), nn.GELU()]
    use_one(layers[0], layers[1], layers[3])
    use_one(layers[0], layers[3], name="bias")
    return layers


def neighbours() -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)]
    use_one(*layers[:2])
    return layers


def inside_a_layer_too() -> list[nn.Module]:
    inner = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
    last = nn.Linear(W, W)
    use_one(inner[0], inner[2], last)
    return [nn.Linear(W, W), inner, nn.Tanh(), last]


def a_module_twice() -> list[nn.Module]:
    layer = nn.Linear(W, W)
    return [layer, nn.Tanh(), nn.Linear(W, W), layer, nn.Tanh()]


def a_module_three_times() -> list[nn.Module]:
    layer = nn.Sequential(nn.LayerNorm(W), nn.Linear(W, W), nn.Dropout(0.3))
    return [layer, layer, nn.Linear(W, W), layer]


def a_submodule_twice() -> list[nn.Module]:
    inner = nn.Linear(W, W)
    return [nn.Sequential(inner, nn.Tanh()), nn.Linear(W, W), nn.Sequential(nn.Tanh(), inner)]


def an_lstm_twice() -> list[nn.Module]:
    cells = nn.LSTM(W, W, num_layers=2, dropout=0.2, batch_first=True)
    return [OfPairs(cells), nn.Linear(W, W), OfPairs(cells)]


def grus_of_one_weight() -> list[nn.Module]:
    first, second = nn.GRU(W, W, batch_first=True), nn.GRU(W, W, batch_first=True)
    use_one(first, second, name="weight_hh_l0")
    return [OfPairs(first), nn.Linear(W, W), OfPairs(second)]


def weight_norms() -> list[nn.Module]:
    layers: list[nn.Module] = [weight_norm(nn.Linear(W, W)), nn.Tanh(), weight_norm(nn.Linear(W, W))]
    use_one(layers[0].parametrizations.weight, layers[2].parametrizations.weight, name="original1")  # type: ignore[union-attr, arg-type]
    return layers


def frozen() -> list[nn.Module]:
    layers = two_uses()
    layers[0].weight.requires_grad_(False)
    return layers


def an_attention_twice() -> list[nn.Module]:
    cells = nn.MultiheadAttention(W, 2, dropout=0.2, batch_first=True)
    return [OfPairs(cells, 3, need_weights=False), nn.Linear(W, W), OfPairs(cells, 3, need_weights=False)]


BUILDS: list[Build] = [
    two_uses, three_uses, neighbours, inside_a_layer_too, a_module_twice, a_module_three_times, a_submodule_twice,
    an_lstm_twice, grus_of_one_weight, weight_norms, frozen, an_attention_twice,
]  # fmt: skip
every_build = pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)


def made(build: Build) -> list[nn.Module]:
    torch.manual_seed(0)
    return build()


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    return mini_batch(W, W, rows)


def train(pipe: gpipe.GPipe, way: str = "step") -> Tensor:
    return laws.train(pipe, *data(), F.mse_loss, way)


def train_plainly(layers: Sequence[nn.Module], way: str = "step", step: int = 0) -> Tensor:
    """The plain loop, each layer on leaves of its own of what it shares; their sums are added in layer order."""
    with lent(layers) as own:
        return laws.train_plainly(own, *data(), F.mse_loss, way, micro_batches=M, seed=5, step=step)
