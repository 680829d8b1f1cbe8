"""What layers do that people write, and that a cut could change: each is as in the plain loop, or told."""

import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import assert_same_bits, plain_loop, same_bits, squares
from tests.support.two_steps import DRIVERS, REMAT, Do, M, X, Y, network


class Bound(nn.Module):
    """Keeps ways to itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act: Any = {
            "method": self.inner,
            "lambda": lambda x: self.linear(x).tanh(),
            "partial": partial(Bound.inner, self),
            "list": [self.inner],
            "hook": None,
        }[kind]
        if kind == "hook":
            self.register_forward_pre_hook(lambda module, args: (self.inner(args[0]),))

    def inner(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        act = self.act[0] if isinstance(self.act, list) else self.act
        return x if act is None else x + act(x)


@pytest.mark.parametrize("kind", ["method", "lambda", "partial", "list", "hook"])
@DRIVERS
@REMAT
def test_a_block_that_is_several_layers_and_refers_to_itself_gives_the_same_for_every_k(
    remat: str, driver: str, kind: str
) -> None:
    found = []
    for partitions in (1, 2, 3):
        torch.manual_seed(0)
        block = Bound(kind)
        with gpipe.GPipe([block] * 3, partitions, 6, driver=driver, remat=remat, seed=0) as pipe:
            pipe.step(X, Y, F.mse_loss)
        found.append(block.linear.weight.grad)
    assert all(same_bits(one, found[0]) for one in found)


@DRIVERS
@REMAT
def test_a_weight_that_another_partition_uses_past_its_layers_is_refused(remat: str, driver: str) -> None:
    layers = network(torch.tanh, torch.sin)
    weight = layers[0].weight
    assert isinstance(weight, Tensor)
    with gpipe.GPipe(layers, [2, 2], M, driver=driver, remat=remat) as pipe:
        with pytest.raises(RuntimeError, match=r"reaches weight of layer 0 \(0: Linear\), which is not its own"):
            pipe.step(X, Y, lambda o, t: (o @ weight.t() - t).pow(2).mean())
        pipe.zero_grad()
        pipe.step(X, Y, F.mse_loss)


@DRIVERS
def test_a_weight_that_two_partitions_use_past_all_layers_is_refused(driver: str) -> None:
    weight = torch.ones(4, requires_grad=True)
    pipe = gpipe.GPipe(network(lambda x: x * weight, lambda x: x + weight), [2, 2], M, driver=driver)
    with pytest.raises(RuntimeError, match=r"a weight of shape \(4,\), which stage \d uses too"):
        pipe.step(X, Y, F.mse_loss)


@DRIVERS
@pytest.mark.parametrize("way", ["step", "call"])
def test_numbers_too_small_to_be_normal_are_flushed_where_the_caller_does_so(way: str, driver: str) -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1e-20) * 1e-20 * 1e38

    pipe = gpipe.GPipe([Small(), nn.Identity()], 2, 2, driver=driver)
    seen = []
    for flushes in (False, True, False):
        if not torch.set_flush_denormal(flushes):
            pytest.skip("this processor has no such mode")
        try:
            with torch.no_grad():
                ones = torch.ones(4, 2)
                out = pipe(ones) if way == "call" else pipe.step(ones, ones, lambda output, _: output.mean())
        finally:
            torch.set_flush_denormal(False)
        seen.append(bool((out == 0).all()))
    assert seen == [False, True, False]


UNSTEADY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda x: x.roll(1 + int(np.random.randint(0, 3)), 1),
    "roll rows": lambda x: x.roll(int(np.random.randint(0, 10_000)), 0) if len(x) > 1 else x * np.random.rand(),
    "sign": lambda x: x * (1 if np.random.rand() < 0.5 else -1),
    "permute": lambda x: x[:, torch.from_numpy(np.random.permutation(4))],
    "last bit": lambda x: x * (1 + float(np.random.randint(0, 1000)) * 1e-7),
}


@DRIVERS
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("kind", UNSTEADY)
def test_a_recompute_that_differs_is_an_error_that_names_the_layer(kind: str, place: int, driver: str) -> None:
    np.random.seed(0)
    layers = network(lambda x: x, lambda x: x)
    layers[place] = Do(UNSTEADY[kind])
    pipe = gpipe.GPipe(layers, [2, 2], M, remat="always", driver=driver)

    def train() -> None:
        for _ in range(8):
            pipe.step(X, Y, F.mse_loss)

    with pytest.raises(RuntimeError, match=rf"layer {place} \({place}: Do\) depends on what no key reaches"):
        train()


def test_a_sparse_embedding_tied_to_the_head_trains() -> None:
    def build() -> tuple[nn.Embedding, nn.Linear]:
        torch.manual_seed(0)
        embedding, head = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 20, bias=False)
        head.weight = embedding.weight
        return embedding, head

    words, found = torch.arange(6) % 5, []
    for partitions in (1, 2):
        layers = build()
        gpipe.GPipe(layers, partitions, 2).step(words, words, F.cross_entropy)
        found.append(layers[0].weight.grad)
    plain = build()
    F.cross_entropy(nn.Sequential(*plain)(words), words).backward()
    assert same_bits(*found)
    assert found[0] is not None
    assert torch.allclose(found[0], plain[0].weight.grad)  # type: ignore[arg-type]  # there is one


@DRIVERS
def test_a_recompute_that_takes_another_path_to_the_same_values_is_an_error(driver: str) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.paths = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.forwards = 0

        def forward(self, x: Tensor) -> Tensor:
            self.forwards += 1
            value: Tensor = self.paths[0](x)
            return value if self.forwards <= M else value.detach() + self.paths[1](x) * 0

    pipe = gpipe.GPipe([nn.Linear(4, 4), Chooses(), nn.Linear(4, 4)], [2, 1], M, remat="always", driver=driver)
    with pytest.raises(RuntimeError, match="a recompute gave other values than its forward"):
        pipe.step(X, Y, F.mse_loss)


@DRIVERS
@REMAT
def test_a_layer_that_calls_backward_in_its_forward_is_refused(remat: str, driver: str) -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x.detach())
            if torch.is_grad_enabled():
                out.pow(2).mean().backward()
            return self.linear(x)

    with pytest.raises(RuntimeError, match="a layer calls backward"):
        gpipe.GPipe([nn.Linear(4, 4), Greedy()], 2, M, driver=driver, remat=remat).step(X, Y, F.mse_loss)


class FlatBias(nn.Module):
    """Adds a parameter of another shape: autograd makes its `.grad` a view of a gradient that is on its way."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.view(x.shape)


class Slow(nn.Module):
    """A linear layer whose recompute takes its time, in which the next stage goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_gradient_on_its_way_is_nobody_elses(schedule: str) -> None:
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    torch.manual_seed(0)
    layers: list[nn.Module] = [Slow(), FlatBias(8), nn.Linear(4, 4), FlatBias(8)]
    expected = copy.deepcopy(layers)
    with gpipe.GPipe(layers, [1, 3], 3, schedule=schedule, seed=0) as pipe:
        for step in range(2):
            loss = pipe.step(x, y, squares)
            assert torch.equal(loss, plain_loop(expected, x, y, squares, micro_batches=3, seed=0, step=step))
            assert_same_bits(nn.Sequential(*layers), expected)
            pipe.zero_grad()
            nn.Sequential(*expected).zero_grad()


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_a_loss_that_is_a_parameter_leaves_later_losses_alone(schedule: str) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return squares(output[:, 1:], target) + output[0, 0]

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(1))
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.first.view(1, 1).expand(len(x), 1), self.linear(x)], 1)

    x, y = torch.randn(6, 4), torch.randn(6, 4)
    layers: list[nn.Module] = [nn.Linear(4, 4), First()]
    expected = copy.deepcopy(layers)
    with gpipe.GPipe(layers, 2, 3, schedule=schedule, seed=0) as pipe:
        loss = pipe.step(x, y, loss_fn)
        assert torch.equal(loss, plain_loop(expected, x, y, loss_fn, micro_batches=3, seed=0, step=0))
        assert_same_bits(nn.Sequential(*layers), expected)
