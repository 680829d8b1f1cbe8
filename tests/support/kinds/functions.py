"""S5: custom Functions, undefined gradients in all positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .blocks import Apply, function, network, plain
from .case import Case, Draw, kind

stop = function(lambda ctx, x: x.clone(), lambda ctx, gradient: None)


class Scale(torch.autograd.Function):
    """A product whose backward asks for zeros where nothing came, or sees None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, materialize: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(materialize)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        x, weight = ctx.saved_tensors
        if gradient is None:
            return None, torch.ones_like(weight), None
        return gradient * weight, (gradient * x).sum(0), None


class Scaled(nn.Module):
    def __init__(self, width: int, materialize: bool) -> None:
        super().__init__()
        self.weight, self.materialize = nn.Parameter(torch.rand(width) + 0.5), materialize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scale.apply(x, self.weight, self.materialize)


def stops() -> tuple[Callable[[], nn.Module], ...]:
    calls = iter(range(10_000))
    return (
        lambda: Apply(stop),
        lambda: Apply(lambda x: x.detach()),
        lambda: Apply(lambda x: x.detach().requires_grad_() * 1),
        lambda: Apply(lambda x: x if x.sum() > 0 else x.detach()),
        lambda: Apply(lambda x: x + stop(x)),
        lambda: Apply(lambda x: torch.zeros_like(x)),
        lambda: Apply(lambda x: stop(x) if x.shape[0] % 2 else x),
        lambda: Apply(lambda x: x.data * (1 if calls else 0)),
        lambda: Apply(lambda x: (x > 0).float()),
    )


def decaying(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that moves what has a gradient of zero, and not what has none."""
    return torch.optim.SGD(list(parameters), lr=0.1, weight_decay=0.1, momentum=0.9)


@kind("S5")
def s5_undefined_gradients(draw: Draw) -> Case:
    """None somewhere: what comes before has zeros or None, as in plain torch."""
    width = draw.width()
    core: list[nn.Module] = [Scaled(width, draw.maybe(0.7)), draw.choice(stops())(), Scaled(width, draw.maybe(0.7))]
    draw.shuffle(core)
    return network(draw, width, core, before=draw.randint(0, 1), optimizer=decaying)


class ThreeOut(torch.autograd.Function):
    """Three outputs, some without gradient; None for some inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, mode: int) -> Any:
        ctx.mode = mode
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(mode % 2 == 0)
        return x * 2, index, y.tanh()

    @staticmethod
    def backward(ctx: Any, first: Any, _: Any, third: Any) -> Any:
        first = None if first is None else first * 2
        return (first, None, None) if ctx.mode < 2 else (None, third, None) if ctx.mode < 4 else (first, third, None)


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Scaled(width, True), Scaled(width, False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


@kind("S5")
def s5_several_routes(draw: Draw) -> Case:
    """Several tensors between layers, of which some get no gradient."""
    width, mode = draw.width(), draw.randint(0, 5)
    uses: tuple[Callable[..., torch.Tensor], ...] = (
        lambda t: t[0],
        lambda t: t[2],
        lambda t: t[0] + t[2].detach(),
        lambda t: t[0].detach() * t[2],
        lambda t: t[0] * t[2] + t[1].unsqueeze(-1),
        lambda t: stop(t[0]) + t[2],
        lambda t: t[1].unsqueeze(-1).expand_as(t[0]) * 1.0,
    )
    core = [Pair(width), Apply(lambda pair: ThreeOut.apply(*pair, mode)), Apply(draw.choice(uses))]
    if draw.maybe(0.4):
        core.insert(2, Apply(lambda t: (t[0], t[1], stop(t[2]))))
    return network(draw, width, core, before=draw.randint(0, 1), optimizer=decaying)


def doubled(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


double = function(doubled, lambda ctx, gradient: gradient * 2)
reverse = function(lambda ctx, x: x.view_as(x), lambda ctx, gradient: -gradient)


class Inner(torch.autograd.Function):
    """Keeps a graph of its own and runs backward within backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = (ctx.x * ctx.x).tanh()
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (made,) = torch.autograd.grad(ctx.y, ctx.x, gradient)
        return made


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, power: int) -> torch.Tensor:
        return x.pow(power)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return gradient * ctx.power * x.pow(ctx.power - 1), None


@kind()
def custom_functions(draw: Draw) -> Case:
    """mark_dirty, views of the input, graphs within, setup_context."""
    width = draw.width()
    options = (lambda x: double(x * 1), reverse, Inner.apply, lambda x: SetUp.apply(x, 3))
    core = [Apply(draw.choice(options)), plain(draw, width), Apply(draw.choice(options))]
    return network(draw, width, core, before=1)
