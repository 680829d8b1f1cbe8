"""Tests that unusual handwritten models train bitwise like the reference loop."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.beside_plain import SEED, Case, M, assert_as_plain
from tests.support.handwritten import CASES, W, blocks, drawn, targets, vectors
from tests.support.plain_loop import one_thread, same_bits, weights_of
from tests.support.planned import pipe_by_costs

SHAPES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"remat": "never"}),
    (3, {}),
    (4, {"schedule": "1f1b", "driver": "lockstep"}),
    (2, {"schedule": "zb_v"}),
    (2, {"schedule": "interleaved", "driver": "lockstep", "remat": "never"}),
]


@pytest.mark.parametrize("name", CASES)
def test_open_models_train_as_the_plain_loop(name: str) -> None:
    case = CASES[name]
    like = None
    for partitions, settings in SHAPES:
        like = assert_as_plain(case, partitions, like=like, **settings)


def under_no_grad(buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(value)


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "no_grad": under_no_grad,
    "data": lambda buffer, value: buffer.data.copy_(value),
    "detach": lambda buffer, value: buffer.detach().copy_(value),
    "new data": lambda buffer, value: setattr(buffer, "data", value.clone()),
    "numpy": lambda buffer, value: np.copyto(buffer.numpy(), value.numpy()),
}
"""Writes into a buffer; most of them do not change the version that torch counts."""


class Quantize(nn.Module):
    """Replaces vectors by the nearest codes, which are moving averages, as in VQ-VAEs. Optionally follows a layer."""

    def __init__(self, write: Callable[[Tensor, Tensor], object], inner: nn.Module) -> None:
        super().__init__()
        self.write, self.inner, self.codes = write, inner, nn.Buffer(drawn(5, W))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        picked = self.codes[torch.cdist(x.detach(), self.codes).argmin(1)]
        if self.training:
            self.write(self.codes, 0.9 * self.codes + 0.1 * x.detach().mean(0))
        return x + (picked - x).detach()


class Quantized(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], object], inner: nn.Module, times: int) -> None:
        super().__init__()
        self.layers = blocks(3).extend([Quantize(write, inner)] * times).extend(blocks(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("inner", "times"), [(nn.Identity, 1), (nn.Identity, 2), (lambda: nn.Linear(W, W), 1)])
@pytest.mark.parametrize("how", WRITES)
def test_a_buffer_is_that_of_the_plain_loop_however_it_is_written(
    how: str, inner: Callable[[], nn.Module], times: int
) -> None:
    case = Case(lambda: Quantized(WRITES[how], inner(), times), vectors, targets)
    like = None
    for partitions, settings in SHAPES[1:4]:
        like = assert_as_plain(case, partitions, like=like, **settings)


class Scaled(nn.Module):
    """Uses its inputs at the beginning, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = layer(x * scale)
        return x + first.exp()


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("remat", ["always", "never"])
def test_inputs_that_want_gradients_get_those_of_the_model_through_a_call(partitions: int, remat: str) -> None:
    with weights_of(5):
        model = Scaled()
    plain = copy.deepcopy(model)
    given, own = ({"x": vectors(7).requires_grad_(), "scale": vectors(7).exp().requires_grad_()} for _ in range(2))

    with one_thread():
        for part in zip(*(value.tensor_split(M) for value in own.values()), strict=True):
            plain(*part).square().sum().backward()
    sample = {name: value.detach() for name, value in given.items()}
    with pipe_by_costs(model, partitions, M, sample=sample, costs="params", seed=SEED, remat=remat) as pipe:
        pipe(given).square().sum().backward()

    assert all(same_bits(given[name].grad, own[name].grad) for name in own)
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
