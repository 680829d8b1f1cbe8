"""S2: where tensors lie in memory; views, slices, strides, and layers that work in place on what comes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .blocks import Apply, Residual, mini_batches, network, plain, squares, touchy
from .case import Case, Draw, kind


def sensitive(draw: Draw, width: int) -> nn.Module:
    """A layer whose bits depend on alignment: always, or on some processors."""
    return draw.choice((touchy, lambda: nn.Linear(width, width)))()


@kind("S2")
def s2_slice_of_data(draw: Draw) -> Case:
    """Mini-batches that are slices of a data set, of odd widths, through layers that can tell."""
    width = draw.choice((5, 7, 10, 13, 30, 33, 50))
    data = torch.randn(100, width)
    starts = [draw.randint(1, 30) for _ in range(draw.steps)]
    batches = [(data[s : s + draw.rows], data[s + 1 : s + 1 + draw.rows]) for s in starts]
    layers = [
        sensitive(draw, width),
        *(plain(draw, width) for _ in range(2)),
        sensitive(draw, width),
        nn.Linear(width, 1),
    ]
    return Case([*layers, nn.Linear(1, width)], batches, loss=draw.choice((nn.functional.mse_loss, squares)))


class Split(nn.Module):
    def __init__(self, width: int, take: Callable[[torch.Tensor, int], torch.Tensor], parts: int) -> None:
        super().__init__()
        self.linear, self.take, self.width = nn.Linear(width, parts * width), take, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.take(self.linear(x), self.width)


@kind("S2")
def s2_view_between(draw: Draw) -> Case:
    """Views in the middle of memory, and strided ones, cross the boundary."""
    width = draw.width()
    takes: tuple[tuple[Callable[[torch.Tensor, int], torch.Tensor], int], ...] = (
        (lambda h, w: h.view(3, -1, w)[1], 3),
        (lambda h, w: h[:, w:], 2),
        (lambda h, w: h.chunk(2, dim=1)[1], 2),
        (lambda h, w: h[:, ::2], 2),
        (lambda h, w: h.view(-1, w, 3)[..., 1], 3),
        (lambda h, w: h.view(-1, w, 3).transpose(1, 2)[:, 2], 3),
        (lambda h, w: torch.cat([h[:, :1], h], 1).flatten()[1:].view(-1)[: h.numel()].view(h.shape), 1),
        (lambda h, w: h.t().contiguous().t(), 1),
    )
    core: list[nn.Module] = []
    for _ in range(draw.randint(1, 2)):
        core += [Split(width, *draw.choice(takes)), sensitive(draw, width)]
    return network(draw, width, core)


@kind("S2")
def s2_gradient_view(draw: Draw) -> Case:
    """Gradients that are views in the middle of memory, or expanded, go back over the boundary."""
    width = draw.width()
    takes: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: torch.cat([x[:, :1].detach(), x], 1)[:, 1:],
        lambda x: torch.cat([x.detach().tanh(), x], 1).view(x.shape[0], 2, -1).sum(1),
        lambda x: x + x.sum(1, keepdim=True),
        lambda x: torch.stack([x, x.detach()], 0)[0],
        lambda x: torch.cat([torch.zeros(1, x.shape[1]), x])[1:],
        lambda x: x.sum().expand(x.shape) * 0.1,
        lambda x: torch.nn.functional.pad(x, (1, 0))[:, 1:].tanh(),
        lambda x: torch.cat([torch.ones(x.shape[0], 3), x], 1).tanh()[:, 3:],
    )
    core = [touchy(), Apply(draw.choice(takes)), touchy(), nn.Linear(width, width), Apply(draw.choice(takes))]
    return network(draw, width, core)


@kind("S2")
def s2_strided_inputs(draw: Draw) -> Case:
    """Mini-batches that are transposed, stepped, expanded, flipped or of other strides."""
    width = draw.width()
    views: tuple[Callable[[int], torch.Tensor], ...] = (
        lambda n: torch.randn(width, n).t(),
        lambda n: torch.randn(n, 2 * width)[:, ::2],
        lambda n: torch.randn(2 * n, width)[1::2],
        lambda n: torch.randn(1, width).expand(n, width),
        lambda n: torch.randn(n, 1).expand(n, width),
        lambda n: torch.randn(n, width + 3)[:, 2:-1],
        lambda n: torch.randn(3, n, width)[1],
        lambda n: torch.randn(n * width + 3)[3:].view(n, width),
    )
    make = draw.choice(views)
    case = network(draw, width, sensitive(draw, width))
    case.batches = [(make(draw.rows), y) for _, y in mini_batches(draw, width)]
    return case


def inplace_layers(width: int) -> tuple[Callable[[], nn.Module], ...]:
    return (
        lambda: nn.ReLU(inplace=True),
        lambda: nn.LeakyReLU(0.1, inplace=True),
        lambda: nn.ELU(inplace=True),
        lambda: nn.Dropout(0.4, inplace=True),
        lambda: nn.Hardtanh(inplace=True),
        lambda: nn.SiLU(inplace=True),
        lambda: Apply(lambda x: x.mul_(0.5).add_(1)),
        lambda: Apply(lambda x: x.clamp_(-1, 1)),
        lambda: Apply(lambda x: x[:, :1].zero_().expand_as(x) + x),
        lambda: Apply(lambda x: x.masked_fill_(x > 1, 0.0)),
        lambda: Residual(nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True))),
    )


@kind("S2")
def s2_inplace_first(draw: Draw) -> Case:
    """A layer that works in place comes first: of the network, and of stages."""
    width = draw.width()
    inplace = draw.sample(inplace_layers(width), 2)
    layers = [inplace[0](), sensitive(draw, width), nn.Linear(width, width), inplace[1](), nn.Linear(width, width)]
    if draw.maybe():
        layers.insert(2, nn.BatchNorm1d(width, eps=1e-2).eval())
    return Case(layers, mini_batches(draw, width), ways=("step",))


@kind()
def stride_zero_between(draw: Draw) -> Case:
    """Expanded tensors, of stride 0, cross the boundary."""
    width = draw.width()
    takes: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: x.mean(1, keepdim=True).expand(x.shape),
        lambda x: x.mean(0, keepdim=True).expand(x.shape),
        lambda x: x.sum().expand(x.shape),
        lambda x: x[:, :1].expand(x.shape),
    )
    core = [Apply(draw.choice(takes)), plain(draw, width), Apply(draw.choice(takes)), sensitive(draw, width)]
    return network(draw, width, core)


@kind()
def channels_last(draw: Draw) -> Case:
    """Images in channels_last, through convolutions."""
    channels = draw.choice((3, 4, 6))

    def block() -> list[nn.Module]:
        norm = draw.choice((nn.Identity, lambda: nn.GroupNorm(1, channels), lambda: nn.BatchNorm2d(channels)))
        return [nn.Conv2d(channels, channels, 3, padding=1), norm(), nn.ReLU(inplace=draw.maybe())]

    layers = [*block(), *block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)]
    model: Any = nn.Sequential(*layers)
    model.to(memory_format=draw.choice((torch.channels_last, torch.contiguous_format)))

    def image() -> torch.Tensor:
        x = torch.randn(draw.rows, channels, 5, 7)
        return x.to(memory_format=torch.channels_last) if draw.maybe(0.8) else x

    return Case(list(model), [(image(), torch.randn(draw.rows, 3)) for _ in range(draw.steps)])
