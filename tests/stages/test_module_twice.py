"""A module that is several layers, of one partition or of several."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import gpipe
from tests.support.odd_layers import Drift
from tests.support.plain_loop import REMATS, assert_same_bits, plain_loop, same_bits
from tests.support.tied_layers import (
    M,
    W,
    a_module_twice,
    data,
    made,
    train,
    train_plainly,
)

# A module that is several layers.


def test_a_module_without_parameters_may_be_many_layers() -> None:
    relu = nn.ReLU(inplace=True)
    torch.manual_seed(0)
    layers = [nn.Linear(W, W), relu, nn.Linear(W, W), relu, nn.Linear(W, W)]
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, 5, M, seed=5)
    assert same_bits(train(pipe), plain_loop(plain, *data(), F.mse_loss, micro_batches=M, seed=5))
    assert_same_bits(pipe, plain)


class Empty(nn.Linear):
    """Has a length, which is 0, and so is not true."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("cut", [[3], [1, 1, 1]], ids=str)
def test_a_module_of_length_0_that_is_two_layers(cut: list[int]) -> None:
    torch.manual_seed(0)
    layer = Empty(W, W)
    layers: list[nn.Module] = [layer, nn.Tanh(), layer]
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, cut, M, seed=5)
    assert same_bits(train(pipe), train_plainly(plain))
    assert_same_bits(pipe, plain)


@contextmanager
def counted(module: nn.Module) -> Iterator[list[str]]:
    """What its hooks hear."""
    heard: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_: heard.append("before")),
        module.register_forward_hook(lambda *_: heard.append("forward")),
        module.register_full_backward_hook(lambda *_: heard.append("backward")),
    ]
    yield heard
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("partitions", [1, 6])
def test_hooks_of_a_module_that_is_two_layers_fire_for_each(partitions: int) -> None:
    layers = [nn.Linear(W, W), *made(a_module_twice)]
    pipe = gpipe.GPipe(layers, partitions, M, remat="never", driver="lockstep")
    with counted(layers[1]) as heard:
        train(pipe)
    assert {what: heard.count(what) for what in set(heard)} == dict.fromkeys(("before", "forward", "backward"), 2 * M)


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("make", [lambda: spectral_norm(nn.Linear(W, W)), lambda: Drift(W, in_place=True)])
def test_a_module_with_state_that_is_two_layers_of_one_partition(make: Callable[[], nn.Module], remat: str) -> None:
    torch.manual_seed(0)
    layer = make()
    layers = [nn.Linear(W, W), layer, nn.Tanh(), layer, nn.Linear(W, W)]
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, [1, 3, 1], M, remat=remat, seed=5)
    assert same_bits(train(pipe), train_plainly(plain))
    assert_same_bits(pipe, plain)


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize(
    "make",
    [lambda: spectral_norm(nn.Linear(W, W)), lambda: Drift(W, in_place=True), lambda: Drift(W, in_place=False)],
)
def test_a_module_with_state_in_two_partitions_is_refused_for_its_state_would_depend_on_which_comes_first(
    make: Callable[[], nn.Module], remat: str, driver: str
) -> None:
    layer = make()
    layers = [nn.Linear(W, W), layer, nn.Tanh(), layer, nn.Linear(W, W)]
    with pytest.raises((ValueError, RuntimeError), match="which comes first"):
        train(gpipe.GPipe(layers, [2, 3], M, remat=remat, driver=driver))


def test_in_evaluation_a_module_with_state_may_be_in_two_partitions() -> None:
    torch.manual_seed(0)
    layer = spectral_norm(nn.Linear(W, W))
    layers = [nn.Linear(W, W), layer, nn.Tanh(), layer, nn.Linear(W, W)]
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, [2, 3], M, seed=5).eval()
    nn.Sequential(*plain).eval()
    assert same_bits(train(pipe), train_plainly(plain))
    assert_same_bits(pipe, plain)
