"""S3: losses with a state of their own, that draw, that tell more, and that pop what layers stashed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..blocks import network, plain
from ..case import Case, Draw, kind


class Centred(nn.Module):
    """A centre that follows the outputs, written in one of many ways."""

    centre: torch.Tensor
    calls: torch.Tensor

    def __init__(self, width: int, how: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.how, self.past, self.scale = how, list[torch.Tensor](), 1.0
        self.norm = nn.BatchNorm1d(width).train() if how == 5 else nn.Identity()
        self.head = nn.Linear(width, width) if how == 6 else nn.Identity()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        made = output.detach()
        with torch.no_grad():
            loss_scale = self.scale + 0.1 * float(self.calls)
        if self.how == 5 and len(output) > 1:
            output = self.norm(output)
        loss = (self.head(output) - self.centre - target).pow(2).mean() * loss_scale
        for past in self.past:
            loss = loss + 0.1 * (output.mean(0) * past).sum()
        with torch.no_grad():
            self.calls += 1
            match self.how:
                case 0:
                    self.centre.lerp_(made.mean(0), 0.5)
                case 1:
                    self.centre = self.centre * 0.9 + made.mean(0) * 0.1
                case 2:
                    self.past = [*self.past, made.mean(0)][-2:]
                case 3:
                    self.scale = 0.5 * self.scale + float(loss.detach())
                case 4:
                    self.centre.data.add_(made.sign().mean(0))
        return loss


@kind("S3")
def s3_stateful_loss(draw: Draw) -> Case:
    width = draw.width()
    loss = Centred(width, draw.randint(0, 6))

    def state() -> dict[str, object]:
        gradients = {name: p.grad for name, p in loss.named_parameters()}
        return {"loss state": [loss.scale, *loss.past, *loss.buffers(), *gradients.values()]}

    return network(draw, width, plain(draw, width), loss=loss, extra=state, ways=("step",))


@kind("S3")
def s3_loss_closure(draw: Draw) -> Case:
    """The state is in a closure: a list, a number, a generator, a dictionary."""
    width, seen, how = draw.width(), list[float](), draw.randint(0, 3)
    counter = iter(range(1, 10_000))
    memory: dict[str, torch.Tensor] = {}

    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        value: torch.Tensor = F.mse_loss(output, target)
        match how:
            case 0:
                value = value * (1 + len(seen))
            case 1:
                value = value / (1 + sum(seen))
            case 2:
                value = value * next(counter)
            case _:
                value = value + (output.mean(0) - memory.get("mean", torch.zeros(width))).pow(2).sum()
                memory["mean"] = output.detach().mean(0)
        seen.append(value.item())
        return value if how != 1 else (value, {"value": value.item()})

    return network(draw, width, plain(draw, width), loss=loss, extra=lambda: {"seen": list(seen)}, ways=("step",))


@kind("S3")
def s3_random_loss(draw: Draw) -> Case:
    """The loss draws: under the key of the index after the last layer."""
    width = draw.width()
    losses: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
        lambda o, t: F.mse_loss(F.dropout(o, 0.4), t),
        lambda o, t: (o[torch.randperm(len(o))] - t).abs().mean(),
        lambda o, t: F.mse_loss(o + 0.1 * torch.randn_like(o), t),
        lambda o, t: F.mse_loss(o, t) * torch.rand(()),
    )
    return network(draw, width, plain(draw, width), loss=draw.choice(losses), ways=("step",))


@kind()
def loss_module_with_parameters(draw: Draw) -> Case:
    """The loss has parameters of its own, which the user trains."""
    width = draw.width()
    loss = Centred(width, 6)
    return network(
        draw, width, plain(draw, width), loss=loss, ways=("step",),
        extra=lambda: {"loss gradients": [p.grad for p in loss.parameters()]},
    )  # fmt: skip


@kind()
def loss_with_metrics(draw: Draw) -> Case:
    width = draw.width()

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Any]:
        off = (output - target).detach()
        return off.new_zeros(()) + F.mse_loss(output, target), {"worst": off.abs().max(), "rows": len(off)}

    return network(draw, width, plain(draw, width), loss=loss, ways=("step",))


class Balanced:
    """A loss that pops what layers stashed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.pop = names

    def __call__(self, output: torch.Tensor, target: torch.Tensor, **popped: torch.Tensor) -> torch.Tensor:
        """Adds all of it."""
        loss: torch.Tensor = F.mse_loss(output, target)
        for i, name in enumerate(self.pop):
            loss = loss + 0.1 * (i + 1) * popped[name].float().mean()
        return loss


class Gate(nn.Module):
    """A gate that stashes its balancing loss, and perhaps more."""

    def __init__(self, width: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self.linear, self.stash = nn.Linear(width, width), names

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        p = self.linear(x).softmax(-1)
        made = [(p.mean(0) ** 2).sum(), p.log().mean(1), p.detach().amax(1), p.argmax(1)]
        return x * p, {name: made[i] for i, name in enumerate(self.stash)}


@kind("S10")
def s10_loss_pops(draw: Draw) -> Case:
    """The right way for auxiliary losses: layers stash, the loss pops; a layer may pop the same."""
    width, count = draw.width(), draw.randint(1, 4)
    first, second = ("balance", "z", "peak", "load")[:count], ("balance2",)
    core = [plain(draw, width), Gate(width, first), *(plain(draw, width) for _ in range(draw.randint(0, 2)))]
    if draw.maybe():
        core += [Gate(width, second), plain(draw, width)]
    names = [name for layer in core if isinstance(layer, Gate) for name in layer.stash]
    if draw.maybe(0.4):
        core.append(AddsMean("balance"))
    if draw.maybe(0.2):
        core.append(Gate(width, ("last",)))
        names.append("last")
    draw.shuffle(names)
    return network(draw, width, core, loss=Balanced(tuple(names)), ways=("step",))


class AddsMean(nn.Module):
    """Adds the mean of what it pops."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.pop = (name,)

    def forward(self, x: torch.Tensor, **popped: torch.Tensor) -> torch.Tensor:
        return x + popped[self.pop[0]].mean()
