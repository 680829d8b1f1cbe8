"""S10: what layers leave on modules for others to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..blocks import Apply, network, plain
from ..case import Case, Draw, kind

WAY = (r"stash|pop",)


class Leaves(nn.Module):
    """A gate that leaves its balancing loss, or a statistic, on itself or another module."""

    aux: Any

    def __init__(self, width: int, detached: bool, target: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.detached = nn.Linear(width, width), detached
        self.__dict__["target"] = target or self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.linear(x).softmax(-1)
        aux = (p.mean(0) ** 2).sum()
        self.__dict__["target"].aux = aux.detach() if self.detached else aux
        return x * p


@kind("S10")
def s10_aux_in_loss(draw: Draw) -> Case:
    """The loss reads what a layer left: told or refused in the first step, with the way."""
    width, detached = draw.width(), draw.maybe()
    gate = Leaves(width, detached)
    if draw.maybe(0.3):
        outer: nn.Module = nn.Sequential(gate, nn.Tanh())
    else:
        outer = gate

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).pow(2).mean() + 0.1 * gate.aux

    core = [outer, *(plain(draw, width) for _ in range(draw.randint(0, 2)))]
    words = (r"layer \d", r"\baux\b", *WAY)
    return network(draw, width, core, loss=loss, refusal=words, told=words, ways=("step",))


class Reads(nn.Module):
    """Reads what another module has."""

    def __init__(self, width: int, read: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(width, width), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * (1 + self.read())
        return out


@kind("S10")
def s10_aux_in_layer(draw: Draw) -> Case:
    """A later layer reads what an earlier one left, with or without its graph."""
    width = draw.width()
    gate = Leaves(width, draw.maybe())
    core = [gate, *(plain(draw, width) for _ in range(draw.randint(0, 1))), Reads(width, lambda: gate.aux)]
    words = (r"layer \d", r"\baux\b", *WAY)
    return network(draw, width, core, refusal=words, told=words)


@kind("S10")
def s10_left_on_another(draw: Draw) -> Case:
    """A layer writes an attribute of a later layer, which reads its own."""
    width = draw.width()
    reader = Reads(width, lambda: reader.aux)
    reader.aux = torch.zeros(())
    gate = Leaves(width, draw.maybe(), reader)
    words = (r"layer \d", r"\baux\b", *WAY)
    return network(draw, width, [gate, plain(draw, width), reader], refusal=words, told=words)


class Caches(nn.Module):
    """Keeps a tensor for whoever looks: nobody does."""

    kept: Any

    def __init__(self, width: int, how: int) -> None:
        super().__init__()
        self.linear, self.how, self.history = nn.Linear(width, width), how, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.linear(x)
        match self.how:
            case 0:
                self.kept = h
            case 1:
                self.kept = h.detach()
            case 2:
                self.kept = {"attention": h.softmax(-1)}
            case _:
                self.history = [*self.history, h.detach()][-3:]
        return h.tanh()


@kind("S10")
def s10_harmless_cache(draw: Draw) -> Case:
    """A module keeps a tensor that nobody reads: the numbers are right, and no error."""
    width = draw.width()
    return network(draw, width, [Caches(width, draw.randint(0, 3)) for _ in range(draw.randint(1, 2))])


@kind("S10")
def s10_kept_for_backward(draw: Draw) -> Case:
    """A hook of the backward reads what a hook of the forward kept, as Grad-CAM does: right, refused or told."""
    width = draw.width()
    layer = nn.Linear(width, width)

    def keep(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        module.kept = out.detach()

    layer.register_forward_hook(keep)
    layer.register_full_backward_hook(lambda m, gi, go: (gi[0] * (1 + m.kept.mean()),))  # type: ignore[index, operator]
    words = (r"layer \d", r"\bkept\b")
    return network(draw, width, layer, before=1, told=words, refusal=words)


@kind("S10")
def s10_side_channel(draw: Draw) -> Case:
    """Layers share an object that is no module: a context, a registry, a list in a closure."""
    width, registry = draw.width(), dict[str, torch.Tensor]()
    detached = draw.maybe()

    def leave(x: torch.Tensor) -> torch.Tensor:
        registry["scale"] = x.detach().mean() if detached else x.mean()
        return x.tanh()

    core = [Apply(leave), plain(draw, width), Apply(lambda x: x * (1 + registry["scale"]))]
    words = (r"layer \d|shared|registry", *WAY)
    return network(draw, width, core, refusal=words, told=words)
