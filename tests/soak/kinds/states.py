"""State that torch's own layers keep: normalization, reparametrization, recurrent state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ..blocks import Apply, network, plain
from ..case import Case, Draw, kind


def enough_rows(draw: Draw) -> None:
    """Two rows at least in each micro-batch."""
    draw.micro_batches = draw.choice((1, 2, 3, 4))
    draw.rows = draw.choice((8, 9, 11, 13))


@kind()
def batch_norm(draw: Draw) -> Case:
    """BatchNorm of all sorts."""
    enough_rows(draw)
    width = draw.width()

    def norm() -> nn.Module:
        return nn.BatchNorm1d(
            width, affine=draw.maybe(0.8), track_running_stats=draw.maybe(0.8), momentum=draw.choice((0.1, None, 0.5))
        )

    core = [norm(), plain(draw, width), norm(), nn.ReLU(inplace=True)]
    case = network(draw, width, core)
    if draw.maybe(0.3):
        core[0].eval()
    return case


@kind()
def other_norms(draw: Draw) -> Case:
    """Norms of groups, instances, layers, rows."""
    enough_rows(draw)
    channels, length = 4, draw.choice((3, 5))
    makes: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.GroupNorm(2, channels),
        lambda: nn.InstanceNorm1d(channels, track_running_stats=True, affine=True),
        lambda: nn.InstanceNorm1d(channels),
        lambda: nn.LocalResponseNorm(2),
        lambda: nn.RMSNorm(length),
        lambda: nn.BatchNorm1d(channels),
        lambda: nn.LayerNorm((channels, length)),
    )
    layers = [nn.Conv1d(2, channels, 1), draw.choice(makes)(), nn.GELU(), nn.Conv1d(channels, channels, 1),
              draw.choice(makes)(), nn.Flatten(), nn.Linear(channels * length, 3)]  # fmt: skip
    return Case(layers, [(torch.randn(draw.rows, 2, length), torch.randn(draw.rows, 3)) for _ in range(draw.steps)])


class Symmetric(nn.Module):
    """A parametrization written by hand, with a buffer."""

    uses: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("uses", torch.zeros(()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.uses += 1
        return (weight + weight.t()) * (0.5 + 0.001 * self.uses.detach().clone())


@kind()
def reparametrizations(draw: Draw) -> Case:
    """Weight and spectral norm of both generations, orthogonal weights, one by hand."""
    width = draw.width()
    makes: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.utils.spectral_norm(nn.Linear(width, width)),
        lambda: parametrizations.spectral_norm(nn.Linear(width, width), n_power_iterations=draw.randint(1, 2)),
        lambda: parametrizations.weight_norm(nn.Linear(width, width)),
        lambda: nn.utils.weight_norm(nn.Linear(width, width)),
        lambda: parametrizations.orthogonal(nn.Linear(width, width)),
        lambda: hand_made(width),
    )
    return network(draw, width, [draw.choice(makes)(), plain(draw, width), draw.choice(makes)()])


def hand_made(width: int) -> nn.Module:
    """A linear layer of symmetric weight."""
    layer = nn.Linear(width, width)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@kind()
def state_in_buffers(draw: Draw) -> Case:
    """State carried from micro-batch to micro-batch: recurrent state, an average, a queue of keys."""
    width, how = draw.width(), draw.randint(0, 3)

    class Carries(nn.Module):
        state: torch.Tensor
        place: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(width, width)
            self.register_buffer("state", torch.zeros(4, width))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.cell(x, self.state[:1].expand(len(x), -1).clone())
            if self.training:
                self.write(h.detach().mean(0))
            return h + self.state.mean(0).detach()

        def write(self, row: torch.Tensor) -> None:
            if how == 0:
                self.state[0] = row
            elif how == 1:
                self.state.mul_(0.9).add_(0.1 * row)
            elif how == 2:
                self.state[self.place] = row
                self.place.copy_((self.place + 1) % 4)
            else:
                self.state = torch.cat([row[None], self.state[:-1]])

    return network(draw, width, [Carries() for _ in range(draw.randint(1, 2))])


@kind()
def vector_quantization(draw: Draw) -> Case:
    """A codebook that follows its inputs by moving averages, with a straight-through estimator."""
    width, count = draw.width(), draw.choice((3, 6))

    class Quantizes(nn.Module):
        book: torch.Tensor
        uses: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("book", torch.randn(count, width))
            self.register_buffer("uses", torch.ones(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = torch.cdist(x.detach(), self.book).argmin(1)
            nearest = self.book[chosen]
            if self.training:
                one_hot = torch.nn.functional.one_hot(chosen, count).float()
                self.uses.mul_(0.9).add_(0.1 * one_hot.sum(0))
                self.book += 0.1 * (one_hot.t() @ x.detach() - one_hot.sum(0)[:, None] * self.book)
            return x + (nearest - x).detach()

    return network(draw, width, [Quantizes(), plain(draw, width)])


@kind()
def module_hooks(draw: Draw) -> Case:
    """Forward hooks and pre-hooks, with keywords, that change what comes and goes; hooks that count in a buffer."""
    width = draw.width()
    layer = nn.Linear(width, width)
    layer.register_buffer("seen", torch.zeros(()))

    def count(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        module.seen.add_(args[0].detach().abs().sum())  # type: ignore[operator]

    options: tuple[Callable[[], object], ...] = (
        lambda: layer.register_forward_pre_hook(count),
        lambda: layer.register_forward_hook(lambda m, args, out: out.tanh() + args[0]),
        lambda: layer.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)),
        lambda: layer.register_forward_hook(lambda m, args, kwargs, out: out * 2, with_kwargs=True),
        lambda: layer.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True),
    )
    for register in draw.sample(options, 2):
        register()
    return network(draw, width, [layer, Apply(lambda x: x * 1.0)])
