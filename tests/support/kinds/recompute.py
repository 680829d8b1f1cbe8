"""S4 and checkpoints: layers that run themselves again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .blocks import network
from .case import Case, Draw, kind


class Again(torch.autograd.Function):
    """Keeps the state of torch's generator, and runs again under it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, run: Callable[..., torch.Tensor], restore: int, weight: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.run, ctx.restore, ctx.state = run, restore, torch.get_rng_state()
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            if ctx.restore == 0:
                with torch.random.fork_rng(devices=[]):
                    torch.set_rng_state(ctx.state)
                    y = ctx.run(x)
            else:
                before = torch.get_rng_state()
                torch.set_rng_state(ctx.state)
                y = ctx.run(x)
                torch.set_rng_state(before)
        torch.autograd.backward(y, gradient)
        return x.grad, None, None, None


class Reversible(nn.Module):
    """A linear layer with noise of some sort, which keeps nothing if `own`."""

    def __init__(self, width: int, noise: int, own: bool, restore: int) -> None:
        super().__init__()
        self.linear, self.noise, self.own, self.restore = nn.Linear(width, width), noise, own, restore

    def run(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        match self.noise:
            case 0:
                return F.dropout(h, 0.5)
            case 1:
                return h + 0.1 * torch.randn_like(h)
            case 2:
                return F.rrelu(h, training=True)
            case _:
                return h * torch.bernoulli(torch.full_like(h, 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.own:
            return self.run(x)
        return Again.apply(x, self.run, self.restore, self.linear.weight)


def both(draw: Draw, width: int, make: Callable[[bool], list[nn.Module]], **further: Any) -> Case:
    """A case whose loop runs the plain layers, of equal weights, and the library those that run again."""
    ours, plain = make(True), make(False)
    for one, other in zip(ours, plain, strict=True):
        other.load_state_dict(one.state_dict())
    case = network(draw, width, ours, before=1, **further)
    replaced = {id(one): other for one, other in zip(ours, plain, strict=True)}
    case.plain = [replaced.get(id(layer), layer) for layer in case.layers]
    return case


@kind("S4")
def s4_own_checkpoint(draw: Draw) -> Case:
    """A layer that puts torch's generator back in its backward: the masks of its forward, or a refusal."""
    width, count = draw.width(), draw.randint(1, 2)
    arguments = [(draw.randint(0, 3), draw.randint(0, 1)) for _ in range(count)]
    return both(
        draw, width, lambda own: [Reversible(width, noise, own, restore) for noise, restore in arguments],
        refusal=(r"layer \d", r"rng|generator|random"),
    )  # fmt: skip


class Checkpointed(nn.Module):
    """A block under `torch.utils.checkpoint`, perhaps within another."""

    def __init__(self, width: int, own: bool, reentrant: bool, depth: int, noise: float) -> None:
        super().__init__()
        self.own, self.reentrant = own, reentrant
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(noise)
        self.inner = Checkpointed(width, own, reentrant, depth - 1, noise) if depth else nn.Tanh()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.dropout(self.linear(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.own or not torch.is_grad_enabled():
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=self.reentrant)


@kind("errors")
def checkpoint_with_dropout(draw: Draw) -> Case:
    """Both kinds of checkpoint, nested, with dropout: the masks of the plain layers."""
    width, count = draw.width(), draw.randint(1, 2)
    arguments = [(draw.maybe(), draw.randint(0, 2), draw.choice((0.0, 0.3, 0.5))) for _ in range(count)]
    return both(draw, width, lambda own: [Checkpointed(width, own, *given) for given in arguments])


@kind("errors")
def checkpoint_sequential_with_dropout(draw: Draw) -> Case:
    width, segments, reentrant = draw.width(), draw.choice((1, 2, 3)), draw.maybe()

    class Segments(nn.Module):
        def __init__(self, own: bool) -> None:
            super().__init__()
            self.own = own
            self.blocks = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.own:
                return self.blocks(x)
            return checkpoint_sequential(self.blocks, segments, x, use_reentrant=reentrant)

    return both(draw, width, lambda own: [Segments(own)])


@kind("errors")
def checkpoint_of_attention(draw: Draw) -> Case:
    """A transformer block with dropout under checkpoint, beside plain ones."""
    width, reentrant = draw.choice((4, 8)), draw.maybe()

    class Block(nn.Module):
        def __init__(self, own: bool) -> None:
            super().__init__()
            self.own = own
            self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.unsqueeze(1)
            y = checkpoint(self.block, x, use_reentrant=reentrant) if self.own else self.block(x)
            return y.squeeze(1)

    return both(draw, width, lambda own: [Block(own), Block(own and draw.maybe())])
