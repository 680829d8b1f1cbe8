"""Networks that people train."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..blocks import Apply, Residual, network, plain, token_loss, tokens
from ..case import Case, Draw, kind


class Recurrent(nn.Module):
    """A recurrent net over (rows, length, width)."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__()
        make = draw.choice((nn.LSTM, nn.GRU, nn.RNN))
        layers, both = draw.randint(1, 2), draw.maybe(0.3)
        self.inner = make(width, width, layers, batch_first=True, dropout=0.2 * (layers > 1), bidirectional=both)
        self.out = nn.Linear(width * (1 + both), width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(self.inner(x)[0])
        return made


class Attention(nn.Module):
    """Causal attention with rotary places from a cache, and dropout."""

    cache: torch.Tensor

    def __init__(self, width: int, heads: int, noise: float, rotary: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.noise, self.rotary = heads, noise, rotary
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def places(self, length: int, width: int) -> torch.Tensor:
        if self.cache.shape[:1] != (length,):
            angle = torch.arange(length)[:, None] / 100 ** (torch.arange(width) / width)
            self.cache = angle.cos()
        return self.cache

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = q * self.places(length, q.shape[-1]), k * self.places(length, q.shape[-1])
        noise = self.noise if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=noise, is_causal=True)
        made: torch.Tensor = self.out(y.transpose(1, 2).reshape(rows, length, width))
        return made


def language(draw: Draw, width: int, blocks: list[nn.Module], tied: bool = False) -> Case:
    """A language model around blocks; the length may change from step to step."""
    count = draw.choice((5, 11))
    embedding, head = nn.Embedding(count, width), nn.Linear(width, count, bias=False)
    if tied:
        head.weight = embedding.weight
    lengths = [draw.choice((1, 3, 5, 6)) for _ in range(draw.steps)]
    batches = [tokens(draw, count, length)[0] for length in lengths]
    layers = [embedding, *blocks, nn.LayerNorm(width), head]
    return Case(layers, batches, loss=token_loss, oracle="shared" if tied else "loop")


@kind()
def recurrent(draw: Draw) -> Case:
    width = draw.choice((4, 5, 8))
    return language(draw, width, [Recurrent(draw, width) for _ in range(draw.randint(1, 2))])


@kind()
def attention(draw: Draw) -> Case:
    width, noise = 8, draw.choice((0.0, 0.2))
    blocks: list[nn.Module] = []
    for _ in range(draw.randint(1, 2)):
        blocks += [
            Residual(Attention(width, 2, noise, draw.maybe())),
            Residual(nn.Sequential(nn.LayerNorm(width), nn.GELU())),
        ]
    return language(draw, width, blocks)


@kind()
def transformer_layers(draw: Draw) -> Case:
    """Torch's own encoder layers, of both norms, perhaps with tied head."""
    first, act = draw.maybe(), draw.choice(("relu", "gelu"))
    blocks = [
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=first, activation=act)
        for _ in range(draw.randint(1, 3))
    ]
    return language(draw, 8, list(blocks), tied=draw.maybe(0.4))


class Decoder(nn.Module):
    """A decoder layer over (text, memory)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(*pair), pair[1]


@kind()
def encoder_decoder(draw: Draw) -> Case:
    """Encoder and decoder with one memory that all decoder layers read."""
    count = 7
    layers: list[nn.Module] = [
        nn.Embedding(count, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        Apply(lambda h: (h.tanh(), h)),
        *(Decoder() for _ in range(draw.randint(1, 3))), Apply(lambda pair: pair[0]), nn.Linear(8, count),
    ]  # fmt: skip
    return Case(layers, tokens(draw, count, draw.choice((2, 5))), loss=token_loss)


@kind()
def state_space(draw: Draw) -> Case:
    """A scan over the sequence, in place into an output, as written by hand."""
    width = draw.choice((4, 7))

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.rand(width)), nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            u, out, h = self.b(x), torch.empty_like(x), torch.zeros_like(x[:, 0])
            for t in range(x.shape[1]):
                h = h * self.a.sigmoid() + u[:, t]
                out[:, t] = h
            return out

    return language(draw, width, [Scan() for _ in range(draw.randint(1, 2))])


@kind()
def convolutions(draw: Draw) -> Case:
    """Convolutions of all sorts, with pooling, normalization and dropout of channels."""
    channels = draw.choice((2, 3, 4))
    noise = draw.choice((nn.Dropout2d, nn.Dropout, nn.FeatureAlphaDropout))
    layers: list[nn.Module] = [
        nn.Conv2d(1, channels, 3, padding=1, stride=draw.choice((1, 2))), nn.ReLU(inplace=True), noise(0.2),
        nn.Conv2d(channels, channels, 3, padding=2, dilation=2, groups=draw.choice((1, channels))),
        draw.choice((nn.MaxPool2d, nn.AvgPool2d))(2, ceil_mode=True), nn.ConvTranspose2d(channels, channels, 2),
        nn.PixelUnshuffle(1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 3),
    ]  # fmt: skip
    return Case(layers, [(torch.randn(draw.rows, 1, 9, 7), torch.randn(draw.rows, 3)) for _ in range(draw.steps)])


@kind()
def unet(draw: Draw) -> Case:
    """Skips of a U-net, joined by `cat`."""
    from .values import Stashes

    class Joins(nn.Module):
        def __init__(self, name: str, width: int) -> None:
            super().__init__()
            self.pop, self.linear = (name,), nn.Linear(2 * width, width)

        def forward(self, x: torch.Tensor, **popped: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.linear(torch.cat([popped[self.pop[0]], x], 1))
            return made

    width = draw.width()
    down = [Stashes(("a",)), plain(draw, width), Stashes(("b",)), plain(draw, width)]
    return network(draw, width, [*down, Joins("b", width), plain(draw, width), Joins("a", width)])


@kind()
def complex_numbers(draw: Draw) -> Case:
    """Complex tensors between layers, and complex parameters."""
    width = draw.choice((4, 5, 8))

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.complex64) / math.sqrt(width))

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return (z @ self.weight).tanh() if z.shape[0] % 2 else z @ self.weight

    to = draw.choice((lambda x: torch.complex(x, -x), lambda x: torch.fft.fft(x)))
    back = draw.choice(
        (lambda z: z.abs(), lambda z: z.real + z.imag, lambda z: torch.view_as_real(z.resolve_conj()).sum(-1))
    )
    return network(draw, width, [Apply(to), Complex(), Apply(lambda z: z.conj()), Apply(back)])


@kind()
def low_precision(draw: Draw) -> Case:
    """Half or bfloat16 layers; or float64."""
    width, dtype = draw.width(), draw.choice((torch.bfloat16, torch.float16, torch.float64))
    layers: list[Any] = [nn.Linear(width, width), plain(draw, width), plain(draw, width), nn.Linear(width, width)]
    layers = [layer.to(dtype) for layer in layers]
    batches = [(draw.data(draw.rows, width).to(dtype), draw.data(draw.rows, width)) for _ in range(draw.steps)]
    return Case(layers, batches, loss=lambda o, t: (o.float() - t).abs().mean())
