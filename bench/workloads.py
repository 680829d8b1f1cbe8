"""The work that is measured: layers, a mini-batch, and a loss, all drawn from a fixed seed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models import amoebanet_d

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """One mini-batch for one network.

    Attributes:
        build: Makes the layers; called after seeding, so that every process has the same weights.
        batch: Makes inputs and targets, N rows each.
        partitions: K, unless the command says otherwise.
        micro_batches: M, likewise.
        cuts: By K, the layers of each partition where they are known to be equal; else measured times decide.
        long: Whether a step takes so long that only the main runtimes are compared.
        sleeps: Whether the layers sleep, so that any number of stages can work at once.
    """

    name: str
    title: str
    build: Callable[[], list[nn.Module]]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Loss
    partitions: int
    micro_batches: int
    cuts: Callable[[int], tuple[int, ...] | None] = lambda partitions: None
    long: bool = False
    sleeps: bool = False

    def layers(self) -> list[nn.Module]:
        """The network, the same at every call."""
        torch.manual_seed(0)
        return self.build()

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same at every call."""
        torch.manual_seed(1)
        return self.batch()


def _even(layers: int) -> Callable[[int], tuple[int, ...] | None]:
    def cuts(partitions: int) -> tuple[int, ...] | None:
        return (layers // partitions,) * partitions if layers % partitions == 0 else None

    return cuts


# Transformer language model.

_VOCABULARY = 1000


class Embedding(nn.Module):
    """Token ids (N, T) to vectors (N, T, d), with a learned position."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks tokens up."""
        found: Tensor = self.words(tokens) + self.places
        return found


class Attention(nn.Module):
    """Causal self-attention behind a norm and beside a residual connection."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.packed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Lets each position attend to those before it: (N, T, d) to (N, T, d)."""
        rows, length, width = x.shape
        packed = self.packed(self.norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return result


class FeedForward(nn.Module):
    """Two linear layers behind a norm and beside a residual connection: (N, T, d) to (N, T, d)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Adds what the layers make of each position."""
        result: Tensor = x + self.body(x)
        return result


def _halves(width: int, length: int) -> list[nn.Module]:
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, _VOCABULARY, bias=False))
    embedding = Embedding(width, length)
    return [embedding, *(layer for _ in range(8) for layer in (Attention(width), FeedForward(width))), head]


def _transformer(width: int, length: int) -> list[nn.Module]:
    embedding, *halves, head = _halves(width, length)
    blocks = [nn.Sequential(*pair) for pair in zip(halves[::2], halves[1::2], strict=True)]
    return [embedding, *blocks, head]


def _tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(_VOCABULARY, (rows, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


# A residual network with BatchNorm whose layers differ much in cost.


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, (N, C, S, S) to (N, D, S/stride, S/stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the shortcut."""
        return F.relu(self.body(x) + self.shortcut(x))


def _conv_net() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        Residual(16, 16),
        Residual(16, 64),
        Residual(64, 64),
        Residual(64, 128, stride=2),
        Residual(128, 128),
        Residual(128, 128),
        Residual(128, 256, stride=2),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(256, 10),
    ]


def _images(rows: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, size, size), torch.randint(classes, (rows,))


# Layers so small that only the runtime is left to measure.


def _tiny() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)]


def _vectors(rows: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(output, target)


# Layers that sleep: as parallel as one likes on any machine.


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds * len(x)
        ctx.save_for_backward(x, weight)
        time.sleep(ctx.seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return gradient * weight, (gradient * x).sum(0), None


class Sleep(nn.Module):
    """Sleeps t a row in the forward and 2t a row in the backward; multiplies by a weight."""

    def __init__(self, seconds: float, width: int = 4) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        """Sleeps and multiplies."""
        slept: Tensor = _Nap.apply(x, self.weight, self.seconds)
        return slept


def sleepers(seconds: Sequence[float]) -> list[nn.Module]:
    """One sleeping layer for each number."""
    return [Sleep(t) for t in seconds]


def sleeping(seconds: float, layers: int = 8, partitions: int = 8, micro_batches: int = 32) -> Workload:
    """Layers that sleep `seconds` each for a micro-batch, which is one row."""
    return Workload(
        "sleeping",
        f"{layers} sleeping layers, forward {seconds * 1e3:g} ms, backward {seconds * 2e3:g} ms",
        partial(sleepers, [seconds] * layers),
        partial(_vectors, micro_batches, 4),
        squared_error,
        partitions,
        micro_batches,
        _even(layers),
        long=True,
        sleeps=True,
    )


WORKLOADS = {
    work.name: work
    for work in (
        Workload(
            "transformer", "Transformer: 8 blocks, d=256, sequence 128, 16 rows",
            partial(_transformer, 256, 128), partial(_tokens, 16, 128), token_loss, partitions=2, micro_batches=8,
        ),
        Workload(
            "halves", "Transformer: 8 blocks as 16 layers, d=256, sequence 128, 16 rows",
            partial(_halves, 256, 128), partial(_tokens, 16, 128), token_loss, partitions=2, micro_batches=8,
        ),
        Workload(
            "transformer-64", "Transformer: 8 blocks, d=256, sequence 128, 64 rows",
            partial(_transformer, 256, 128), partial(_tokens, 64, 128), token_loss, partitions=2, micro_batches=32,
            long=True,
        ),
        Workload(
            "conv", "residual conv net with BatchNorm: 10 layers of very different costs, 32 images of 32x32",
            _conv_net, partial(_images, 32, 32, 10), F.cross_entropy, partitions=2, micro_batches=8,
        ),
        Workload(
            "amoebanet", "AmoebaNet-D (6, 64), 32 images of 64x64",
            partial(amoebanet_d, layers=6, filters=64, classes=10, dropout=0.0),
            partial(_images, 32, 64, 10), F.cross_entropy, partitions=2, micro_batches=8,
        ),
        Workload(
            "tiny", "tiny layers: 8 x Linear(32) + Tanh, one row a micro-batch",
            _tiny, partial(_vectors, 64, 32), squared_error, partitions=2, micro_batches=64,
            cuts=_even(8),
        ),
        sleeping(0.005),
        Workload(
            "wide", "Transformer: 8 blocks, d=512, sequence 32, 16 rows",
            partial(_transformer, 512, 32), partial(_tokens, 16, 32), token_loss, partitions=2, micro_batches=8,
        ),
    )
}  # fmt: skip
