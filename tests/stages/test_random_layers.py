"""Randomness in whole pipes: keyed by (seed, step, layer, micro-batch), the same however a pipe is cut and run."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS, assert_same_bits, plain_loop, same_bits
from tests.support.random_layers import (
    RANDOM,
    WIDTH,
    Does,
    M,
    data,
    network,
    run,
    run_plainly,
)


@pytest.mark.parametrize("kind", RANDOM)
def test_a_random_layer_gives_the_bits_of_the_plain_loop_for_every_cut_remat_and_driver(kind: str) -> None:
    ways = [
        ([5], "never", "lockstep", "step"),
        ([5], "always", "threads", "call"),
        ([1, 1, 1, 1, 1], "always", "threads", "step"),
        ([2, 3], "except_last", "threads", "call"),
        ([2, 1, 2], "always", "lockstep", "call"),
    ]
    for cut, remat, driver, way in ways:
        layers = network(kind)
        plain = copy.deepcopy(layers)
        with gpipe.GPipe(layers, cut, M, remat=remat, driver=driver, seed=7) as pipe:
            untouched = torch.get_rng_state()
            for step in (0, 1):
                assert same_bits(run(pipe, way), run_plainly(plain, way, step))
                assert_same_bits(pipe, plain)
            assert torch.equal(untouched, torch.get_rng_state())


class Mask(nn.Module):
    """Keeps the masks that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(64))
        self.masks.append(mask)
        return x * mask[:WIDTH] * self.scale


def masks(seed: int, *, steps: int = 2, layers: int = 2) -> list[list[Tensor]]:
    made = [Mask() for _ in range(layers)]
    pipe = gpipe.GPipe(made, 1, M, remat="never", driver="lockstep", seed=seed)
    for _ in range(steps):
        pipe.step(data()[0], data()[0], F.mse_loss)
    return [layer.masks for layer in made]


def all_different(drawn: Sequence[Tensor]) -> bool:
    return len({tuple(mask.tolist()) for mask in drawn}) == len(drawn)


def test_every_micro_batch_step_layer_and_seed_draws_its_own() -> None:
    drawn = [mask for seed in (0, 1) for of_layer in masks(seed) for mask in of_layer]
    assert len(drawn) == 2 * 2 * 2 * M
    assert all_different(drawn)


def test_a_step_number_set_back_draws_the_same_again() -> None:
    layer = Mask()
    pipe = gpipe.GPipe([layer], 1, M, remat="never", seed=0)
    for number in (5, 6, 5):
        pipe.step_number = number
        pipe.step(data()[0], data()[0], F.mse_loss)
    assert all(torch.equal(one, other) for one, other in zip(layer.masks[:M], layer.masks[2 * M :], strict=True))
    assert all_different(layer.masks[: 2 * M])


def test_a_call_keys_its_recompute_by_its_own_step() -> None:
    layer = Mask()
    pipe = gpipe.GPipe([layer], 1, M, remat="always", driver="lockstep", seed=0)
    first, second = pipe(data()[0]), pipe(data()[0])
    second.sum().backward()
    first.sum().backward()
    forwards, recomputes = layer.masks[: 2 * M], layer.masks[2 * M :]
    assert all_different(forwards)
    again = [*recomputes[M:], *recomputes[:M]]
    assert all(torch.equal(one, other) for one, other in zip(forwards, again, strict=True))


def test_evaluation_draws_nothing_from_dropout_and_noise_is_keyed_there_too() -> None:
    noise = Does(lambda x: x + torch.randn_like(x))
    pipe = gpipe.GPipe([nn.Linear(WIDTH, WIDTH), nn.Dropout(), noise], 2, M, seed=0).eval()
    untouched = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(pipe(data()[0]), pipe(data()[0]))
    assert torch.equal(untouched, torch.get_rng_state())


@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("remat", REMATS)
def test_a_random_loss_is_keyed_like_a_layer_behind_the_last(remat: str, partitions: int) -> None:
    def loss_fn(output: Any, target: Any) -> Tensor:
        return F.mse_loss(F.dropout(output, 0.5), target + torch.rand(2))

    layers = network("dropout")
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, partitions, M, remat=remat, seed=7)
    untouched = torch.get_rng_state()
    for step in (0, 1):
        loss = pipe.step(*data(), loss_fn)
        assert same_bits(loss, plain_loop(plain, *data(), loss_fn, micro_batches=M, seed=7, step=step))
        assert_same_bits(pipe, plain)
    assert torch.equal(untouched, torch.get_rng_state())


def test_a_seed_is_drawn_once_from_torchs_generator() -> None:
    seeds = []
    for _ in range(2):
        torch.manual_seed(4)
        seeds.append([gpipe.GPipe([nn.Dropout(0.5)], 1, 2).seed for _ in range(2)])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


def test_a_layer_with_a_generator_of_its_own_draws_from_it() -> None:
    own, other = (torch.Generator().manual_seed(7) for _ in range(2))
    with torch.no_grad():
        output = gpipe.GPipe([nn.Identity(), Does(lambda x: x + torch.rand(x.shape, generator=own))], 2, 2)(
            torch.zeros(4, 3)
        )
    assert torch.equal(output, torch.cat([torch.rand(2, 3, generator=other) for _ in range(2)]))
