"""S1: hooks that layers put on their own inputs, on what they make of them, on modules and on parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from .blocks import Residual, network
from .case import Case, Draw, kind

Change = Callable[[torch.Tensor], torch.Tensor | None]


def changes(draw: Draw, log: list[float]) -> Change:
    """What a hook does to a gradient."""

    def record(g: torch.Tensor) -> None:
        log.append(g.double().abs().sum().item())

    def record_and_halve(g: torch.Tensor) -> torch.Tensor:
        record(g)
        return g * 0.5

    options: tuple[Change, ...] = (
        lambda g: g * 0.5,
        lambda g: -g,
        lambda g: g.clamp(-0.01, 0.01),
        lambda g: torch.zeros_like(g),
        lambda g: g / (g.norm() + 1e-3),
        lambda g: g * (g > 0),
        lambda g: g.sign() * 0.01,
        record,
        record_and_halve,
    )
    return draw.choice(options)


class HookedInput(nn.Module):
    """Hooks its input, or a view of it, before it uses it."""

    def __init__(self, width: int, view: Callable[[torch.Tensor], torch.Tensor], hooks: list[Change], guarded: bool):
        super().__init__()
        self.linear, self.view, self.hooks, self.guarded = nn.Linear(width, width), view, hooks, guarded
        self.removed = self.retained = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        viewed = self.view(x)
        if viewed.requires_grad or not self.guarded:
            handles = [viewed.register_hook(hook) for hook in self.hooks]
            if self.removed:
                handles[0].remove()
        if self.retained and viewed.requires_grad:
            viewed.retain_grad()
        return self.linear(viewed)


def hooked(draw: Draw, log: list[float], views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]) -> Case:
    """A network with one or two layers that hook their inputs."""
    width = draw.width()
    core: list[nn.Module] = []
    for _ in range(draw.randint(1, 2)):
        hooks = [changes(draw, log) for _ in range(draw.randint(1, 2))]
        layer = HookedInput(width, draw.choice(views), hooks, draw.maybe(0.7))
        layer.removed, layer.retained = draw.maybe(0.15), draw.maybe(0.15)
        core.append(layer)
    return network(draw, width, core, before=1, extra=lambda: {"hooks": sorted(log)})


@kind("S1")
def s1_tensor_hook(draw: Draw) -> Case:
    return hooked(draw, [], (lambda x: x,))


@kind("S1")
def s1_hook_on_view(draw: Draw) -> Case:
    views = (lambda x: x.view_as(x), lambda x: x[:], lambda x: x.view(-1).view(x.shape), lambda x: x.t().t())
    return hooked(draw, [], views)


@kind("S1")
def s1_module_hook(draw: Draw) -> Case:
    """Forward pre-hooks that hook the input, full backward hooks and pre-hooks, forward hooks on the output."""
    width, log = draw.width(), list[float]()
    layer: nn.Module = draw.choice(
        (lambda: nn.Linear(width, width), lambda: Residual(nn.Linear(width, width)), nn.Tanh)
    )()

    def register(module: nn.Module) -> None:
        change = changes(draw, log)

        def on_tensor(tensor: torch.Tensor) -> None:
            if tensor.requires_grad:
                tensor.register_hook(change)

        def on_gradients(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(g if g is None or (made := change(g)) is None else made for g in gradients)

        match draw.randint(0, 4):
            case 0:
                module.register_forward_pre_hook(lambda m, args: on_tensor(args[0]))
            case 1:
                module.register_full_backward_hook(lambda m, gi, go: on_gradients(gi))
            case 2:
                module.register_full_backward_pre_hook(lambda m, go: on_gradients(go))
            case 3:
                module.register_forward_hook(lambda m, args, out: on_tensor(out))
            case _:
                module.register_forward_hook(lambda m, args, out: on_tensor(args[0]))

    for _ in range(draw.randint(1, 2)):
        register(layer)
    return network(draw, width, [layer, nn.Linear(width, width)], before=1, extra=lambda: {"hooks": sorted(log)})


class MultiHooked(nn.Module):
    """A multi-grad hook over its input and what it makes of it."""

    def __init__(self, width: int, mode: str, log: list[float], inner: bool) -> None:
        super().__init__()
        self.linear, self.mode, self.log, self.inner = nn.Linear(width, width), mode, log, inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.linear(x)
        if x.requires_grad and h.requires_grad:
            watched = (x, h) if self.inner else (x,)
            if self.mode == "all":
                register_multi_grad_hook(watched, self.seen)
            else:
                register_multi_grad_hook(watched, lambda g: self.log.append(g.double().sum().item()), mode="any")
        return h.tanh() + x

    def seen(self, gradients: Any) -> None:
        self.log.extend(0.0 if g is None else g.double().sum().item() for g in gradients)


@kind("S1")
def s1_multi_grad_hook(draw: Draw) -> Case:
    width, log = draw.width(), list[float]()
    layers = [MultiHooked(width, draw.choice(("all", "any")), log, draw.maybe()) for _ in range(draw.randint(1, 2))]
    return network(draw, width, layers, before=1, extra=lambda: {"hooks": sorted(log)})


class HookedPair(nn.Module):
    """Hooks one of two inputs, the same tensor perhaps."""

    def __init__(self, width: int, which: int, change: Change) -> None:
        super().__init__()
        self.linear, self.which, self.change = nn.Linear(width, width), which, change

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if pair[self.which].requires_grad:
            pair[self.which].register_hook(self.change)
        return self.linear(pair[0]) * pair[1]


class Fork(nn.Module):
    """Gives its input twice: as two tensors, views of one, or one."""

    def __init__(self, mode: int) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ((x.tanh(), x.sigmoid()), (x, x), (x.view_as(x), x), (x, x.detach()))[self.mode]


@kind("S1")
def s1_hook_on_one_of_two(draw: Draw) -> Case:
    width, log = draw.width(), list[float]()
    pair = [Fork(draw.randint(0, 3)), HookedPair(width, draw.randint(0, 1), changes(draw, log))]
    words = (r"layer \d", r"hook")  # where one of the two was made from the other, a hook would see a part
    return network(draw, width, pair, before=1, extra=lambda: {"hooks": sorted(log)}, refusal=words)


@kind()
def parameter_hooks(draw: Draw) -> Case:
    """Hooks on parameters: they fire for each micro-batch."""
    width, log = draw.width(), list[float]()
    layer = nn.Linear(width, width)
    layer.weight.register_hook(changes(draw, log))
    if draw.maybe():
        layer.bias.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.double().sum().item()))
    return network(draw, width, layer, extra=lambda: {"hooks": sorted(log)})


class Graph(nn.Module):
    """Asks the graph behind its input for something."""

    def __init__(self, width: int, asked: int) -> None:
        super().__init__()
        self.linear, self.asked = nn.Linear(width, width), asked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            match self.asked:
                case 0 if x.grad_fn is not None:
                    x.grad_fn.register_prehook(lambda gradients: tuple(g * 0.5 for g in gradients))
                case 1 if x.grad_fn is not None:
                    x.grad_fn.register_hook(lambda inner, outer: tuple(g if g is None else g * 0.5 for g in inner))
                case 2 if x.is_leaf:
                    x = x * 2
                case 3:
                    x = x * (1.0 + float(x.output_nr))
        return self.linear(x)


@kind("S1")
def s1_node_hook(draw: Draw) -> Case:
    """Hooks on the node behind the input, and branches upon it: right, or refused."""
    width = draw.width()
    return network(
        draw,
        width,
        Graph(width, draw.randint(0, 3)),
        before=1,
        refusal=(r"layer \d",),
        told=(r"layer \d", r"grad_fn", r"register_hook"),
    )
