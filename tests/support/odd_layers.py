"""Layers for tests: what a layer may give to the next, draw, keep, leave unused or change in place."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.plain_loop import Tree


class Apply(nn.Module):
    """A function as a layer, and the layer that it uses, if any."""

    def __init__(self, function: Callable[..., Any], uses: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.uses = function, uses

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


# What comes in, and what is given to the next layer.


class OnFirst(nn.Module):
    """A layer that works on the first of several values and passes the others on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: dict[str, Tensor] | tuple[Tensor, Tensor]) -> Tree:
        if isinstance(value, dict):
            return {**value, "x": self.layer(value["x"])}
        return (self.layer(value[0]), *value[1:])


class Fork(nn.Module):
    """One tensor in, several values out: what they have to do with each other is its `kind`."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tree:
        y = self.linear(x)
        match self.kind:
            case "skip":
                return y, x
            case "same":
                return y, y
            case "chunks":
                return y.chunk(2, dim=1)
            case "turned":  # not contiguous, and a view
                return y.t().contiguous().t(), x[:, ::2]
            case _:  # integers, what needs no gradient, and what is no tensor
                mask = (x.detach().sum(1, keepdim=True) > 0).long()
                return {"x": y, "mask": mask, "side": x.detach() * 0.5, "none": None, "flag": True}


class Join(nn.Module):
    def __init__(self, width: int, side: int, out: int) -> None:
        super().__init__()
        self.main = nn.Linear(width, out)
        self.side = nn.Linear(side, out)

    def forward(self, value: dict[str, Tensor] | tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(value, dict):
            x, side = value["x"], value["side"] * value["mask"]
        else:
            x, side = value
        return self.main(x) + self.side(side)


class Stash(nn.Module):
    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.stash = (name,)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.linear(x), {self.stash[0]: x}


class Pop(nn.Module):
    def __init__(self, widths: dict[str, int], width: int) -> None:
        super().__init__()
        self.pop = tuple(widths)
        self.linears = nn.ModuleDict({name: nn.Linear(size, width) for name, size in widths.items()})

    def forward(self, x: Tensor, **popped: Tensor) -> Tensor:
        for name, tensor in popped.items():
            x = x + self.linears[name](tensor) * tensor.mean(1, keepdim=True)
        return x


class TakesWhole(nn.Module):
    """The first layer of a model with a table that every micro-batch takes whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        x, table = value
        return self.linear(x) + table.mean(0)


# What is drawn.


class Noise(nn.Module):
    """Draws, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) * torch.rand(x.shape[1], device=x.device)


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.rand(len(x), 1, device=x.device) + 0.1 * torch.randn(x.shape[1], device=x.device)
        x = x[:, torch.randperm(x.shape[1], device=x.device)] * torch.randint(1, 3, (len(x), 1), device=x.device)
        chosen = torch.multinomial(torch.ones(x.shape[1], device=x.device), 1)
        noise = torch.empty_like(x).uniform_(-0.1, 0.1) + torch.normal(0.0, 0.1, x.shape, device=x.device)
        return x + noise + x[:, chosen] * torch.bernoulli(torch.full((len(x), 1), 0.5, device=x.device))


class StochasticDepth(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(len(x), 1, device=x.device) < 0.6
        return x + self.inner(x) * kept / 0.6


class LayerDrop(nn.Module):
    """Runs its layer or not, by chance: some micro-batches give its parameters no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if torch.rand((), device=x.device) < 0.5 else x * 1.5


class Attention(nn.Module):
    """Attention over the rows' halves, with dropout on its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, 3 * 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x).view(len(x), 2, 3, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3 if self.training else 0.0)
        return x + mixed.sum(1)


class OfPairs(nn.Module):
    """A layer of sequences, here of two, which it takes so many times; of what it gives the first counts."""

    def __init__(self, layer: nn.Module, times: int = 1, **how: bool) -> None:
        super().__init__()
        self.layer, self.times, self.how = layer, times, how

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(*[torch.stack([x, x.tanh()], 1)] * self.times, **self.how)
        out: Tensor = made if isinstance(made, Tensor) else made[0]
        return out.sum(1)


def attention(width: int, *, need_weights: bool = False) -> nn.Module:
    """torch's own, weights wanted or not: two implementations."""
    layer = nn.MultiheadAttention(width, 1, dropout=0.3, batch_first=True)
    return OfPairs(layer, 3, need_weights=need_weights)


def recurrent(width: int, kind: type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]) -> nn.Module:
    """Of two layers, with dropout between them."""
    return OfPairs(kind(width, width, num_layers=2, dropout=0.4, batch_first=True))


class Images(nn.Module):
    """A convolution, with a BatchNorm2d and a dropout of whole channels."""

    def __init__(self, width: int, *, norm: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Unflatten(1, (1, 1, width)),
            nn.Conv2d(1, 2, (1, 3), padding=(0, 1)),
            nn.BatchNorm2d(2) if norm else nn.Identity(),
            nn.Dropout2d(0.3),
            nn.Conv2d(2, 1, 1),
            nn.Flatten(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


# What is trained, and what changes by itself.


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def half_frozen(width: int) -> nn.Module:
    layer = Block(width)
    layer.inner[1].requires_grad_(False)
    return layer


class LowRank(nn.Module):
    """A frozen layer with a small trained one beside it (LoRA)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 1, bias=False)
        self.up = nn.Linear(1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Experts(nn.Module):
    """Uses one parameter for some micro-batches and another for others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x.detach().abs().sum().nan_to_num(0.0, 0.0, 0.0) * 1000) % 3  # a model may have come to NaN
        return self.experts[chosen](x)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Drift(nn.Module):
    """Has a buffer that its forward changes and uses: in place, or by assignment."""

    mean: Tensor

    def __init__(self, width: int, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean.clone()
        self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return x * (1 + self.mean)
