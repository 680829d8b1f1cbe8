"""Small layers that the kinds are made of."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.support.addresses import by_address
from tests.support.odd_layers import Apply as Apply

from .case import Case, Draw


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of autograd, of its two parts."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    made: Any = type("Function", (torch.autograd.Function,), parts)
    apply: Callable[..., Any] = made.apply
    return apply


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def touchy() -> nn.Module:
    """A layer whose result depends on alignment."""
    return Apply(by_address)


def plain(draw: Draw, width: int) -> nn.Module:
    """A layer of the ordinary sort, of as many features out as in."""
    makers: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.Linear(width, width),
        lambda: nn.Linear(width, width),
        nn.Tanh,
        nn.GELU,
        lambda: nn.Dropout(0.3),
        lambda: nn.LayerNorm(width),
        lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
        lambda: Residual(nn.Linear(width, width)),
    )
    return draw.choice(makers)()


def around(draw: Draw, width: int, *core: nn.Module, before: int = 0, after: int = 0) -> list[nn.Module]:
    """The core with ordinary layers before and after it, at least so many, and a linear one in front."""
    head = [nn.Linear(width, width), *(plain(draw, width) for _ in range(max(before - 1, 0) + draw.randint(0, 1)))]
    tail = [plain(draw, width) for _ in range(after + draw.randint(0, 2))]
    return [*(head if before or draw.maybe(0.7) else []), *core, *tail, nn.Linear(width, width)]


def mini_batches(draw: Draw, width: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(draw.data(draw.rows, width), draw.data(draw.rows, width)) for _ in range(draw.steps)]


def network(draw: Draw, width: int, core: nn.Module | Sequence[nn.Module], **further: Any) -> Case:
    """A case around a core, on numbers, with a loss of the ordinary sort."""
    before, after = further.pop("before", 0), further.pop("after", 0)
    layers = around(draw, width, *([core] if isinstance(core, nn.Module) else core), before=before, after=after)
    losses = (nn.functional.mse_loss, nn.functional.mse_loss, nn.functional.smooth_l1_loss, nn.L1Loss(), squares)
    further.setdefault("loss", draw.choice(losses))
    return Case(layers, mini_batches(draw, width), **further)


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def tokens(draw: Draw, classes: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mini-batches of token numbers, and the next ones."""
    shape = (draw.rows, length)
    return [(draw.labels(*shape, classes=classes), draw.labels(*shape, classes=classes)) for _ in range(draw.steps)]


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
