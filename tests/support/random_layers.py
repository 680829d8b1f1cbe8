"""Layers that draw in every way, and how networks of them train."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support import plain_loop as laws
from tests.support.odd_layers import Apply, LayerDrop, OfPairs, StochasticDepth, attention, recurrent
from tests.support.plain_loop import mini_batch

M = 3
WIDTH = 6


def images(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (3, 2, 1)), layer, nn.Flatten())


def attend(x: Tensor) -> Tensor:
    pairs = x.view(len(x), 2, 3)
    return F.scaled_dot_product_attention(pairs, pairs.sin(), pairs, dropout_p=0.5).flatten(1)


def gumbel(x: Tensor) -> Tensor:
    return x + F.gumbel_softmax(x, tau=0.5)


def permuted(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))] + x[:, torch.randperm(x.shape[1])]


def multinomial(x: Tensor) -> Tensor:
    return x + x.gather(1, torch.multinomial(x.detach().softmax(1), 2)).sum(1, keepdim=True)


def in_place(x: Tensor) -> Tensor:
    noise = torch.empty_like(x)
    total = torch.zeros_like(x)
    for fill in ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "bernoulli_"):
        total = total + getattr(noise, fill)().clamp(-2, 2)
    return x + 0.1 * total + torch.empty(x.shape).geometric_(0.5) + torch.empty(x.shape).random_(3)


def distributions(x: Tensor) -> Tensor:
    scale = x.detach().abs() + 0.1
    drawn = torch.distributions.Normal(x, scale).rsample()
    drawn = drawn + torch.distributions.Gamma(scale, 1.0).sample() + torch.distributions.Poisson(scale).sample()
    drawn = drawn + torch.distributions.Categorical(logits=x.detach()).sample()[:, None]
    drawn = drawn + torch.distributions.Dirichlet(scale).sample() + torch.distributions.Beta(scale, scale).sample()
    return drawn + torch.distributions.Binomial(5, scale.clamp(max=0.9) * 0 + 0.5).sample()


def like(x: Tensor) -> Tensor:
    numbers = torch.randint_like(x, 3) + torch.randint(1, 4, (len(x), 1))
    return x * (torch.rand_like(x) + torch.randn_like(x)) + numbers + torch.normal(x.detach(), 0.1)


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "dropout in place": lambda: nn.Dropout(0.5, inplace=True),
    "dropout1d": lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Dropout1d(), nn.Flatten()),
    "dropout2d": lambda: images(nn.Dropout2d()),
    "dropout3d": lambda: nn.Sequential(nn.Unflatten(1, (3, 2, 1, 1)), nn.Dropout3d(), nn.Flatten()),
    "alpha dropout": lambda: nn.AlphaDropout(0.5),
    "feature alpha dropout": lambda: images(nn.FeatureAlphaDropout(0.5)),
    "functional dropout": lambda: Apply(lambda x: F.dropout(x, 0.3, training=True)),
    "rrelu": nn.RReLU,
    "rrelu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(inplace=True)),
    "scaled dot product attention": lambda: Apply(attend),
    "multi-head attention": lambda: attention(WIDTH),
    "multi-head attention, weights": lambda: attention(WIDTH, need_weights=True),
    "transformer layer": lambda: OfPairs(nn.TransformerEncoderLayer(WIDTH, 1, 5, dropout=0.4, batch_first=True)),
    "lstm": lambda: recurrent(WIDTH, nn.LSTM),
    "gru": lambda: recurrent(WIDTH, nn.GRU),
    "rnn": lambda: recurrent(WIDTH, nn.RNN),
    "stochastic depth": lambda: LayerDrop(WIDTH),
    "stochastic depth by row": lambda: StochasticDepth(WIDTH),
    "fractional pooling": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.FractionalMaxPool2d(2, output_size=(1, 2)), nn.Flatten(), nn.Linear(2, WIDTH)
    ),
    "rand": lambda: Apply(lambda x: x * torch.rand(len(x), 1)),
    "randn": lambda: Apply(lambda x: x + torch.randn(x.shape, dtype=torch.float64).float()),
    "randint": lambda: Apply(lambda x: x * torch.randint(1, 5, (len(x), 1))),
    "randperm": lambda: Apply(permuted),
    "multinomial": lambda: Apply(multinomial),
    "like": lambda: Apply(like),
    "in place fills": lambda: Apply(in_place),
    "gumbel softmax": lambda: Apply(gumbel),
    "distributions": lambda: Apply(distributions),
}


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    return mini_batch(WIDTH, 2, rows)


def run(pipe: gpipe.GPipe, way: str = "step") -> Tensor:
    return laws.train(pipe, *data(), F.mse_loss, way)


def run_plainly(layers: Sequence[nn.Module], way: str = "step", step: int = 0) -> Tensor:
    return laws.train_plainly(layers, *data(), F.mse_loss, way, micro_batches=M, seed=7, step=step)
