"""Models that nobody foresaw train as the plain loop trains them, to the last bit."""

import copy
from typing import Any

import pytest
from torch import Tensor, nn

import gpipe
from tests.support.beside_plain import SEED, M, assert_as_plain
from tests.support.handwritten import CASES, blocks, vectors
from tests.support.plain_loop import one_thread, same_bits, weights_of

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


class Scaled(nn.Module):
    """A model that uses its inputs first, midway and last."""

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
    with gpipe.GPipe(model, partitions, M, sample=sample, costs="params", seed=SEED, remat=remat) as pipe:
        pipe(given).square().sum().backward()

    assert all(same_bits(given[name].grad, own[name].grad) for name in own)
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
