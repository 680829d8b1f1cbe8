"""Layers with state of any kind: parametrizations, pruning, buffers that are written in every way, parts frozen."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from .blocks import network
from .case import Case, Draw, kind


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Annealed(nn.Module):
    """A parametrization with state: it shrinks the weight with every forward in training."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.9)
        return x * self.scale.clone()


def parametrized(width: int, *parametrizations: nn.Module) -> nn.Module:
    layer = nn.Linear(width, width)
    for parametrization in parametrizations:
        parametrize.register_parametrization(layer, "weight", parametrization)
    return layer


def of_old(make: Callable[[nn.Module], nn.Module], width: int) -> nn.Module:
    """The normalizations that work by hooks, which torch deprecates and people still have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return make(nn.Linear(width, width))


class Ema(nn.Module):
    """Follows its input in a buffer, in place; writes another by assignment, a third behind torch's back."""

    mean: Tensor
    last: Tensor
    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("last", torch.zeros(width), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("empty", None)

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean.clone() + self.last * 0.1 + self.count * 0.01
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.3)
            self.last = x.detach()[-1].clone()
            self.count.data += 1
        return x + before


class ReadsItsBatchNorm(nn.Module):
    """Uses the running statistics of its own BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        assert self.norm.running_mean is not None
        return out + self.norm.running_mean.clone()


class MakesItsBuffer(nn.Module):
    """Has no buffer before its first forward."""

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "mean"):
            self.mean.lerp_(x.detach().mean(0), 0.5)
        else:
            self.register_buffer("mean", x.detach().mean(0))
        return x - self.mean


class Delays(nn.Module):
    """Has a buffer behind every other forward, which the next takes."""

    held: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", None)

    def forward(self, x: Tensor) -> Tensor:
        before, self.held = self.held, x.detach().mean(0) if self.held is None else None
        return x if before is None else x + before


class KeepsASign(nn.Module):
    """Writes what it may have already, the sign of a zero too, which torch calls equal to another."""

    sign: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sign", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        before = self.sign.clone()
        self.sign.copy_(0.0 * x.detach().mean())
        return x * torch.ones(()).copysign(before)


class MakesItsNorm(nn.Module):
    """Has no module inside before its first forward."""

    norm: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(x.shape[1], affine=False)
        out: Tensor = self.norm(x)
        return out


STATEFUL: tuple[Callable[[int], nn.Module], ...] = (
    lambda w: spectral_norm(nn.Linear(w, w)),
    lambda w: nn.Sequential(spectral_norm(nn.Linear(w, w), n_power_iterations=3), spectral_norm(nn.Linear(w, w))),
    lambda w: of_old(torch.nn.utils.spectral_norm, w),
    lambda w: weight_norm(nn.Linear(w, w)),
    lambda w: of_old(torch.nn.utils.weight_norm, w),
    lambda w: orthogonal(nn.Linear(w, w)),
    lambda w: parametrized(w, Symmetric()),
    lambda w: parametrized(w, Annealed(), Symmetric()),
    lambda w: prune.random_unstructured(nn.Linear(w, w), "weight", amount=0.4),
    Ema,
    ReadsItsBatchNorm,
    lambda w: MakesItsBuffer(),
    lambda w: Delays(),
    lambda w: KeepsASign(),
    lambda w: MakesItsNorm(),
    lambda w: nn.Sequential(nn.Unflatten(1, (1, w)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()),
    lambda w: nn.Sequential(nn.BatchNorm1d(w), nn.Linear(w, w), nn.BatchNorm1d(w, momentum=None)),
    lambda w: nn.Linear(w, w).requires_grad_(False),
    lambda w: nn.Sequential(nn.Tanh(), nn.Hardtanh()),
    lambda w: nn.Sequential(nn.Linear(w, w, bias=False), nn.LayerNorm(w, elementwise_affine=False)),
)


@kind()
def layers_with_state(draw: Draw) -> Case:
    """Two layers of one sort, by Adam, with an evaluation behind each step."""
    width, make, seen = draw.width(), draw.choice(STATEFUL), list[Tensor]()
    draw.rows, draw.steps = max(draw.rows, 2 * draw.micro_batches), 3
    core = [nn.Linear(width, width), make(width), nn.Dropout(0.2), make(width)]
    case = network(draw, width, core, extra=lambda: {"evaluated": list(seen)})
    case.optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.1)

    def evaluate(trainer: Any, step: int) -> None:
        trainer.train(False)
        with torch.no_grad():
            seen.append(trainer.forward(case.batches[step][0]).clone())
        trainer.train()

    case.between = evaluate
    return case


class Greedy(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x.detach())
        if torch.is_grad_enabled():
            out.pow(2).mean().backward()
        return self.linear(x)


@kind()
def backward_in_a_forward(draw: Draw) -> Case:
    width = draw.width()
    return network(draw, width, Greedy(width), refusal=(r"\[backward-in(side)?-forward\]",))
