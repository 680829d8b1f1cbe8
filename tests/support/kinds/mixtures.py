"""Mixtures of experts, adapters, and parts that take no part."""

import torch
from torch import nn

from .blocks import Apply, Residual, network, plain
from .case import Case, Draw, kind


class Experts(nn.Module):
    """Top-k routing; an expert may be given no rows, and then is not called, or is called with none."""

    def __init__(self, width: int, count: int, top: int, always: bool, noisy: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count))
        self.top, self.always, self.noisy = top, always, noisy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        if self.noisy:
            scores = scores + 0.5 * torch.randn_like(scores)
        weights, chosen = scores.softmax(-1).topk(self.top)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            if self.always or len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


@kind()
def mixture_of_experts(draw: Draw) -> Case:
    """Routed experts: gradients are None, zero or numbers, by who was given rows."""
    width = draw.width()
    blocks = [
        Residual(Experts(width, draw.randint(2, 6), draw.randint(1, 2), draw.maybe(), draw.maybe(0.3)))
        for _ in range(draw.randint(1, 2))
    ]
    return network(draw, width, blocks)


@kind()
def capacity_drops(draw: Draw) -> Case:
    """Rows that find no room are dropped; the number of rows changes between layers and comes back."""
    width = draw.width()

    def drop(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keep = (x.detach().sum(1) > 0).nonzero()[:, 0]
        return x[keep], keep, x

    def back(value: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        kept, keep, x = value
        return x.index_add(0, keep, kept)

    linear = nn.Linear(width, width)
    inner = Apply(lambda value: (linear(value[0]), *value[1:]), linear)
    return network(draw, width, [Apply(drop), inner, Apply(back), plain(draw, width)])


@kind()
def unused_parameters(draw: Draw) -> Case:
    """Parameters without any use, used in some micro-batches only, or only in evaluation."""
    width = draw.width()

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(width, width), nn.Linear(width, width)
            self.bare, self.how = nn.Parameter(torch.randn(3)), draw.randint(0, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (self.how == 0 and x.detach().sum() > 0) or (self.how == 1 and not self.training):
                x = self.unused(x)
            return self.used(x) if self.how < 2 or len(x) % 2 else x

    return network(draw, width, [Sometimes() for _ in range(draw.randint(1, 2))])
