"""Layers that draw in any way: their draws are functions of (seed, step, layer, micro-batch) in a pipe too."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS, assert_same_bits, plain_loop


class Attention(nn.Module):
    """Attention over the row alone: six values as three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (3, 4))
        out: Tensor = self.attention(tokens, tokens, tokens)[0]
        return out.flatten(1)


class Function(nn.Module):
    """A function that draws."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Recurrent(nn.Module):
    """Dropout between the layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x.unflatten(1, (3, 4)))[0]
        return out.flatten(1)


def image(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (3, 2, 2)), layer, nn.Flatten())


def attend(x: Tensor) -> Tensor:
    tokens = x.unflatten(1, (3, 4))
    return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.5).flatten(1)


def stochastic_depth(x: Tensor) -> Tensor:
    keep = torch.rand(len(x), 1) < 0.5
    return x + torch.where(keep, x.sin(), 0.0)


def jitter(x: Tensor) -> Tensor:
    noise = (
        torch.randn_like(x) + torch.rand(x.shape) + torch.empty_like(x).normal_() + torch.normal(0.0, 1.0, x.shape)
    )
    mask = torch.bernoulli(torch.full_like(x, 0.5)) + torch.randint(3, x.shape)
    order = torch.randperm(x.shape[1])
    picked = torch.multinomial(x.detach().softmax(1), 2)
    return x[:, order] * mask + noise + x.gather(1, picked).sum(1, keepdim=True)


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "dropout_in_place": lambda: nn.Dropout(0.5, inplace=True),
    "alpha_dropout": lambda: nn.AlphaDropout(0.5),
    "dropout1d": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), nn.Dropout1d(), nn.Flatten()),
    "dropout2d": lambda: image(nn.Dropout2d()),
    "dropout3d": lambda: nn.Sequential(nn.Unflatten(1, (3, 2, 2, 1)), nn.Dropout3d(), nn.Flatten()),
    "feature_alpha_dropout": lambda: image(nn.FeatureAlphaDropout()),
    "rrelu": nn.RReLU,
    "rrelu_in_place": lambda: nn.RReLU(inplace=True),
    "attention": Attention,
    "scaled_dot_product": lambda: Function(attend),
    "transformer_layer": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 4)), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True), nn.Flatten()
    ),
    "lstm": Recurrent,
    "stochastic_depth": lambda: Function(stochastic_depth),
    "gumbel": lambda: Function(lambda x: F.gumbel_softmax(x, dim=1)),
    "everything": lambda: Function(jitter),
    "distribution": lambda: Function(lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample()),
}


def network(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(5, 12), DRAWING[name](), nn.Linear(12, 12), DRAWING[name](), nn.Linear(12, 2)]


@pytest.mark.parametrize("name", DRAWING)
def test_the_bits_are_those_of_the_plain_loop_for_every_cut_remat_and_driver(name: str) -> None:
    reference = network(name)
    x, y = torch.randn(7, 5), torch.randn(7, 2)
    for step in (0, 1):
        plain_loop(reference, x, y, F.mse_loss, micro_batches=3, seed=9, step=step)
    state = torch.get_rng_state()
    for cut in (1, [1, 4], 5):
        for remat in REMATS:
            for driver in ("threads", "lockstep"):
                layers = network(name)
                torch.set_rng_state(state)
                with gpipe.GPipe(layers, cut, 3, seed=9, remat=remat, driver=driver) as pipe:
                    for _ in (0, 1):
                        pipe.step(x, y, F.mse_loss)
                    assert_same_bits(pipe, reference)
                assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", DRAWING)
def test_micro_batches_steps_layers_and_seeds_draw_apart(name: str) -> None:
    layers = [nn.Identity(), DRAWING[name]()]
    x = torch.randn(1, 12).repeat(60, 1)
    pipe = gpipe.GPipe(layers, 2, 3, seed=9)
    again = gpipe.GPipe(copy.deepcopy(layers), 1, 3, seed=9)
    other_seed = gpipe.GPipe(copy.deepcopy(layers), 1, 3, seed=10)
    other_layer = gpipe.GPipe([nn.Identity(), *copy.deepcopy(layers)], 1, 3, seed=9)
    with torch.no_grad():
        first, second = pipe(x), pipe(x)
        assert torch.equal(first, again(x))
        assert torch.equal(second, again(x))
        different = [*first.split(20), *second.split(20), other_seed(x)[:20], other_layer(x)[:20]]
    assert all(not torch.equal(a, b) for at, a in enumerate(different) for b in different[:at])


def test_the_step_number_says_what_is_drawn() -> None:
    pipe = gpipe.GPipe([nn.Dropout(0.5)], 1, 2, seed=9)
    x = torch.ones(4, 10)
    with torch.no_grad():
        outputs = [pipe(x) for _ in range(3)]
        assert pipe.step_number == 3
        pipe.step_number = 1
        assert torch.equal(pipe(x), outputs[1])


def test_a_seed_is_drawn_once_from_torchs_generator() -> None:
    torch.manual_seed(4)
    one = gpipe.GPipe([nn.Dropout(0.5)], 1, 2)
    two = gpipe.GPipe([nn.Dropout(0.5)], 1, 2)
    torch.manual_seed(4)
    again = gpipe.GPipe([nn.Dropout(0.5)], 1, 2)
    assert one.seed == again.seed != two.seed


class Generates(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.generator)


def test_a_layer_with_a_generator_of_its_own_draws_from_it() -> None:
    x = torch.zeros(4, 3)
    with torch.no_grad():
        output = gpipe.GPipe([nn.Identity(), Generates()], 2, 2)(x)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(output, torch.cat([torch.rand(2, 3, generator=generator) for _ in range(2)]))
