"""S4 and checkpoints: layers that run themselves again in the backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .blocks import Apply, network
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


How = Callable[[nn.Module, torch.Tensor], torch.Tensor]
"""Runs a module on a tensor, and again in the backward."""


class Block(nn.Module):
    def __init__(self, inner: nn.Module, how: How | None) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.how is None else self.how(self.inner, x)


def both(draw: Draw, width: int, make: Callable[[bool], list[nn.Module]], **further: Any) -> Case:
    """A case whose loop runs the plain layers, of equal weights, and the library those that run again."""
    ours, plain = make(True), make(False)
    for one, other in zip(ours, plain, strict=True):
        other.load_state_dict(one.state_dict())
    case = network(draw, width, ours, before=1, **further)
    replaced = {id(one): other for one, other in zip(ours, plain, strict=True)}
    case.plain = [replaced.get(id(layer), layer) for layer in case.layers]
    return case


Noise = Callable[[torch.Tensor], torch.Tensor]


def leaky(h: torch.Tensor) -> torch.Tensor:
    return F.rrelu(h, training=True)


NOISES: tuple[Noise, ...] = (
    lambda h: F.dropout(h, 0.5),
    lambda h: h + 0.1 * torch.randn_like(h),
    leaky,
    lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
)


KEPT_NOISES = tuple(noise for noise in NOISES if noise is not leaky)
"""RReLU saves its noise before it draws it: a checkpoint that stops early leaves it undefined, in torch itself."""


@kind("S4")
def s4_own_checkpoint(draw: Draw) -> Case:
    """A layer that puts torch's generator back in its backward: the masks of its forward, or a refusal."""
    width, count = draw.width(), draw.randint(1, 2)
    arguments = [(draw.choice(NOISES), draw.randint(0, 1)) for _ in range(count)]

    def layer(own: bool, noise: Callable[[torch.Tensor], torch.Tensor], restore: int) -> nn.Module:
        linear = nn.Linear(width, width)
        how: How = lambda inner, x: Again.apply(x, inner, restore, linear.weight)  # noqa: E731  # of this layer
        return Block(nn.Sequential(linear, Apply(noise)), how if own else None)

    return both(
        draw, width, lambda own: [layer(own, *given) for given in arguments],
        refusal=(r"layer \d", r"rng|generator|random"),
    )  # fmt: skip


CHECKPOINTS: tuple[How | None, ...] = (
    None,
    partial(checkpoint, use_reentrant=True),
    partial(checkpoint, use_reentrant=False),
    partial(checkpoint, use_reentrant=False, early_stop=False),
)


@kind("errors")
def checkpoint_with_dropout(draw: Draw) -> Case:
    """All kinds of checkpoint, nested, that draw before what is inside or behind it: the numbers of plain layers."""
    width, count = draw.width(), draw.randint(1, 2)
    arguments = [
        [(draw.choice(CHECKPOINTS), draw.choice(KEPT_NOISES), draw.maybe()) for _ in range(draw.randint(1, 3))]
        for _ in range(count)
    ]

    def layer(own: bool, levels: Sequence[tuple[How | None, Noise, bool]]) -> nn.Module:
        (how, noise, first), *inner = levels
        parts = [Apply(noise), layer(own, inner) if inner else nn.Tanh()]
        return Block(nn.Sequential(nn.Linear(width, width), *parts[:: 1 if first else -1]), how if own else None)

    return both(draw, width, lambda own: [layer(own, levels) for levels in arguments])


@kind("errors")
def checkpoint_sequential_with_dropout(draw: Draw) -> Case:
    width, segments, reentrant = draw.width(), draw.choice((1, 2, 3)), draw.maybe()

    def layer(own: bool) -> nn.Module:
        blocks = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, width))
        how: How = lambda inner, x: checkpoint_sequential(inner, segments, x, use_reentrant=reentrant)  # noqa: E731
        return Block(blocks, how if own else None)

    return both(draw, width, lambda own: [layer(own)])
