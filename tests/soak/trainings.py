"""A fixed set of trainings, by the public interface alone: what `same_bits` takes the digests of.

Nothing here is drawn: whoever changes a training must record the old library again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from gpipe.models import amoebanet_b, amoebanet_d, transformer_lm, unet

Build = Callable[[], Any]
ROWS = (8, 7, 3)
"""Of the mini-batch of each step: equal micro-batches, unequal ones, and fewer than M."""


@dataclass(frozen=True)
class Training:
    """A network with its data, and how it is trained.

    Attributes:
        build: Makes the layers.
        batch: Inputs and targets of as many rows as it is given.
        options: Of `gpipe.GPipe`, beside partitions, micro-batches and seed.
        further: Keywords of `step`.
        way: `"step"`, or `"call"`: `loss.backward()` of what the pipe returns.
        around: What each step runs in.
        scaled: Whether a `GradScaler` scales the loss.
    """

    name: str
    build: Build
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[..., Any]
    partitions: int = 2
    micro_batches: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)
    way: str = "step"
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    scaled: bool = False


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Both(nn.Module):
    """Two linear layers on the two parts of a tuple, mixed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        left, right = pair
        return torch.tanh(self.left(left)) + right, self.right(right) * left


class Named(nn.Module):
    """A linear layer on one entry of a dict; the others pass by, one of them of integers, one None."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "x": torch.relu(self.linear(values["x"])), "rows": values["rows"] + 1}


class Counting(nn.Module):
    """Has a buffer that every forward in training changes, and reads it."""

    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen * 0.9 + x.detach().mean(0)
        return torch.sigmoid(self.linear(x - self.seen))


class Stash(nn.Module):
    """Linear; keeps what it was given under a name."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.linear, self.stash = nn.Linear(width, width), (name,)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.tanh(self.linear(x)), {self.stash[0]: x * 2}


class Pop(nn.Module):
    """Linear of the sum with what was kept under a name."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.linear, self.pop = nn.Linear(width, width), (name,)

    def forward(self, x: Tensor, **kept: Tensor) -> Tensor:
        return F.gelu(self.linear(x + kept[self.pop[0]]))


class PoppingLoss:
    """A loss that takes a stash."""

    pop = ("e0",)

    def __call__(self, output: Tensor, target: Tensor, e0: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.1 * e0.square().mean()


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs, momentum=None),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


# Networks.


def mlp(width: int = 24) -> list[nn.Module]:
    return [nn.Linear(12, width), nn.Tanh(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 5)]  # fmt: skip


def random_mlp() -> list[nn.Module]:
    return [nn.Linear(12, 24), nn.Dropout(0.4), nn.Linear(24, 24), nn.RReLU(), nn.AlphaDropout(0.2), nn.Linear(24, 5)]


def in_place() -> list[nn.Module]:
    return [nn.Linear(12, 24), nn.Dropout(0.3, inplace=True), nn.ReLU(inplace=True), nn.Linear(24, 24),
            nn.LeakyReLU(inplace=True), nn.Linear(24, 5), nn.ELU(inplace=True)]  # fmt: skip


def tuples() -> list[nn.Module]:
    return [nn.Linear(12, 12), Apply(lambda x: (x, x.sin())), Both(12), Both(12),
            Apply(lambda pair: pair[0] + pair[1]), nn.Linear(12, 5)]  # fmt: skip


def dicts() -> list[nn.Module]:
    return [Named(12), Named(12), Apply(lambda d: {**d, "nothing": None}), Named(12),
            Apply(lambda d: d["x"] * d["rows"][:, None]), nn.Linear(12, 5)]  # fmt: skip


def views() -> list[nn.Module]:
    return [nn.Linear(12, 24), Apply(lambda x: x.view(-1, 4, 6).transpose(1, 2)), nn.Linear(4, 4),
            Apply(lambda x: x[:, ::2]), nn.Flatten(), nn.Linear(12, 5)]  # fmt: skip


def convolutions() -> list[nn.Module]:
    return [nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)), Residual(6, 8), nn.MaxPool2d(2),
            Residual(8, 8), nn.Dropout2d(0.2), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(8, 5)]  # fmt: skip


def stateful() -> list[nn.Module]:
    return [nn.Linear(12, 12), Counting(12), spectral_norm(nn.Linear(12, 12)), Counting(12), nn.Linear(12, 5)]


def skipping() -> list[nn.Module]:
    return [Stash(12, "e0"), Stash(12, "e1"), nn.Linear(12, 12), Pop(12, "e1"), Pop(12, "e0"), nn.Linear(12, 5)]


def shared() -> list[nn.Module]:
    twice = nn.Linear(12, 12)
    return [twice, nn.Tanh(), nn.Linear(12, 12), twice, nn.Sigmoid(), nn.Linear(12, 5)]


def tied() -> list[nn.Module]:
    return [nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 5)]


def named() -> nn.Sequential:
    layers = mlp()
    for parameter in layers[2].parameters():
        parameter.requires_grad_(False)
    return nn.Sequential(OrderedDict((f"part{at}", layer) for at, layer in enumerate(layers)))


def recurrent() -> list[nn.Module]:
    return [nn.Embedding(20, 12), nn.LSTM(12, 12, batch_first=True), Apply(lambda pair: pair[0]),
            nn.TransformerEncoderLayer(12, 3, 24, 0.1, batch_first=True), nn.Linear(12, 20)]  # fmt: skip


def built() -> list[Callable[[], nn.Module]]:
    return [partial(nn.Linear, 12, 24), nn.Tanh, partial(nn.Linear, 24, 24), nn.ReLU, partial(nn.Linear, 24, 5)]


# Data.


def vectors(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 12), torch.randn(rows, 5)


def classes(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 12), torch.randint(5, (rows,)).index_fill_(0, torch.tensor([0]), -100)


def entries(rows: int) -> tuple[dict[str, Tensor], Tensor]:
    return {"x": torch.randn(rows, 12), "rows": torch.arange(rows)}, torch.randn(rows, 5)


def images(rows: int, size: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, size, size), torch.randint(5, (rows,))


def masks(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 64, 64), torch.rand(rows, 1, 64, 64)


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    found = torch.randint(20, (rows, 10))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


# Losses.


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def measured_loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.mse_loss(output, target), {"largest": output.detach().abs().max(), "rows": torch.tensor(len(output))}


def counted(target: Tensor) -> float:
    return float(len(target) * (len(target) + 1))


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


T = Training
NETWORKS = (
    T("mlp", mlp, vectors, F.mse_loss),
    T("random mlp", random_mlp, vectors, F.mse_loss),
    T("in place", in_place, vectors, F.mse_loss),
    T("tuples", tuples, vectors, F.mse_loss),
    T("dicts", dicts, entries, F.mse_loss),
    T("views", views, vectors, F.smooth_l1_loss),
    T("convolutions", convolutions, images, F.cross_entropy),
    T("deferred batch norm", convolutions, images, F.cross_entropy, options={"deferred_batch_norm": True}),
    T("state", stateful, vectors, F.mse_loss),
    T("skips", skipping, vectors, F.mse_loss),
    T("shared", shared, vectors, F.mse_loss),
    T("tied", tied, vectors, F.mse_loss, options={"ties": [("0.weight", "2.weight")]}),
    T("frozen and named", named, vectors, F.mse_loss),
    T("recurrent", recurrent, tokens, token_loss),
    T("callables", built, vectors, F.mse_loss),
    T("transformer", partial(transformer_lm, 3, 24, 48, 4, 20, tied=True, dropout=0.1), tokens, token_loss),
    T("amoebanet", partial(amoebanet_d, 3, 16, 5), partial(images, size=64), F.cross_entropy, micro_batches=2),
)
"""Each is trained by three of the settings."""
SPECIAL = (
    T("popping loss", skipping, vectors, PoppingLoss(), 3),
    T("metrics", mlp, vectors, measured_loss, 3, options={"remat": "never"}),
    T("ignored classes", mlp, classes, nn.CrossEntropyLoss(ignore_index=-100), 2),
    T("own weights", random_mlp, vectors, F.mse_loss, 3, further={"reduction": counted}),
    T("a sum, scaled", mlp, vectors, F.mse_loss, 4, further={"reduction": "sum", "scale": 0.25}),
    T("autocast", random_mlp, vectors, F.mse_loss, 3, around=autocast),
    T("autocast of convolutions", convolutions, images, F.cross_entropy, 2, around=autocast, way="call"),
    T("scaler", mlp, vectors, F.mse_loss, 2, scaled=True),
    T("two threads an operation", convolutions, images, F.cross_entropy, 2, options={"intra_op_threads": 2}),
    T("U-Net", partial(unet, 1, 4), masks, F.binary_cross_entropy_with_logits, 4, 2),
    T("amoebanet b", partial(amoebanet_b, 3, 16, 5), partial(images, size=64), F.cross_entropy, 3, 2),
    T("remat by partition", stateful, vectors, F.mse_loss, 3, options={"remat": ["always", "never", "except_last"]}),
)
SETTINGS = (
    (2, "always", "threads", "step"), (1, "never", "lockstep", "step"), (4, "except_last", "threads", "call"),
    (3, "except_last", "lockstep", "step"), (2, "never", "threads", "step"), (4, "always", "lockstep", "call"),
    (3, "always", "threads", "call"), (4, "never", "threads", "step"), (1, "always", "threads", "call"),
    (2, "except_last", "lockstep", "call"), (3, "never", "lockstep", "call"),
)  # fmt: skip
WORLD = 2
OVER_PROCESSES = (
    "mlp", "random mlp", "tuples", "deferred batch norm", "skips", "shared", "transformer", "in place", "metrics",
    "scaler", "own weights", "autocast",
)  # fmt: skip
CALLED = ("random mlp", "shared", "convolutions")
REPLICATED = ("random mlp", "shared", "deferred batch norm", "transformer", "state")


def trainings() -> Iterator[Training]:
    """All that run in one process."""
    settings = cycle(SETTINGS)
    for training in NETWORKS:
        for _ in range(3):
            yield configured(training, *next(settings))
    yield from SPECIAL


def configured(training: Training, partitions: int, remat: str, driver: str, way: str) -> Training:
    """The training in a setting, which its name tells."""
    return replace(
        training,
        name=f"{training.name}, K={partitions}, remat {remat}, {driver}, {way}",
        partitions=partitions,
        options={**training.options, "remat": remat, "driver": driver},
        way=way,
    )


def trainings_of_processes() -> Iterator[Training]:
    """Those that two processes run: with a partition each, by step and by call; and as two replicas."""
    remats = cycle(("always", "never", "except_last"))
    for training in (training for training in (*NETWORKS, *SPECIAL) if training.name in OVER_PROCESSES):
        yield configured(training, WORLD, next(remats), "process", "step")
    for training in (training for training in NETWORKS if training.name in CALLED):
        yield configured(training, WORLD, next(remats), "process", "call")
    for training in (training for training in NETWORKS if training.name in REPLICATED):
        yield configured(training, 1, next(remats), "process", "step")
    plain = next(training for training in NETWORKS if training.name == "convolutions")
    synchronized = replace(plain, name="synchronized batch norm", options={"sync_batch_norm": True})
    yield configured(synchronized, 1, "always", "process", "step")
