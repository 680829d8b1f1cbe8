"""Losses that keep state, pop what a layer stashed, work in place, or read layers."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import Apply, mini_batches, network, squares
from .case import Case, Draw, kind
from .values import WIDTH, Prototypes


class Centred(nn.Module):
    """Keeps a moving centre of what it sees."""

    centre: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(width))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - self.centre - target).pow(2).mean()
        self.centre.lerp_(output.detach().mean(0), 0.5)
        return loss


@kind("S3")
def s3_loss_with_state(draw: Draw) -> Case:
    """It sees the micro-batches in their order, each once."""
    loss = Centred(WIDTH)
    return network(draw, WIDTH, nn.Linear(WIDTH, WIDTH), loss=loss, extra=lambda: {"centre": loss.centre})


class Gate(nn.Module):
    stash = ("balance",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        share = self.linear(x).softmax(-1)
        return x * share, {"balance": (share.mean(0) ** 2).sum()}


class Balanced:
    pop = ("balance",)

    def __call__(self, output: Tensor, target: Tensor, balance: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.1 * balance


@kind("S10")
def s10_stashes_and_losses(draw: Draw) -> Case:
    """A loss pops what a layer stashed; a stash that nobody pops, and a pop that nobody stashed, are refused."""
    core, loss, words = draw.choice(
        (
            (Gate(), Balanced(), None),
            (Gate(), Balanced(), None),
            (Gate(), F.mse_loss, (r"layer \d \(Gate\) stashes 'balance', but neither a later layer nor loss_fn",)),
            (nn.Tanh(), Balanced(), ("loss_fn pops 'balance', which no layer stashes",)),
        )
    )
    refused = {"refusal": words, "must_refuse": words is not None, "remedy": False}
    return network(draw, WIDTH, core, loss=loss, ways=("step",), **refused)


@kind()
def loss_in_place(draw: Draw) -> Case:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        target[target > 1] = 0.0
        return F.mse_loss(output.clamp_(-0.5, 0.5), target)

    return network(draw, WIDTH, nn.Linear(WIDTH, WIDTH), loss=loss, ways=("step",))


@kind()
def loss_reads_a_buffer(draw: Draw) -> Case:
    """The loss reads a layer whose buffers each forward changes: right in one stage, refused or reported in two."""
    layer = Prototypes()
    return network(
        draw, WIDTH, layer, loss=lambda o, t: F.mse_loss(o, layer.mean.clone().expand_as(o)), ways=("step",),
        refusal=("the loss for micro-batch .* differs (from the reference|if the other stages)",),
        told=(r"\[state-of-different-stage\]",),
    )  # fmt: skip


class First(nn.Module):
    """Puts a parameter in front of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first.view(1, 1).expand(len(x), 1), self.linear(x)], 1)


def schedules(draw: Draw) -> dict[str, Any]:
    return {"schedule": draw.choice(("gpipe", "1f1b", "zb_h1"))}


@kind()
def loss_that_is_a_parameter(draw: Draw) -> Case:
    """It leaves later losses alone."""
    layers, batches = [nn.Linear(4, 4), First()], mini_batches(draw, 4)
    return Case(layers, batches, loss=lambda o, t: squares(o[:, 1:], t) + o[0, 0], options=schedules(draw))


class FlatBias(nn.Module):
    """Adds a parameter of another shape: autograd makes its `.grad` a view of a gradient that is on its way."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.view(x.shape)


@kind()
def gradient_on_its_way(draw: Draw) -> Case:
    """It is nobody else's, though the stage that it goes to is slow to take it."""
    draw.micro_batches, draw.rows = 3, 6

    def dawdle(x: Tensor) -> Tensor:
        time.sleep(0.004)
        return x

    layers = [nn.Linear(4, 4), Apply(dawdle), FlatBias(8), nn.Linear(4, 4), FlatBias(8)]
    return Case(layers, mini_batches(draw, 4), cut=(2, 3), options=schedules(draw), drivers=("threads",))
