"""S13: how the losses of micro-batches make one, by torch's own losses, reductions and weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..blocks import mini_batches, network, plain, tokens
from ..case import Case, Draw, kind

Entry = tuple[Callable[[], Any], Callable[[Draw, int, int], torch.Tensor]]


def numbers(draw: Draw, rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, dtype=torch.float64)


def unit(draw: Draw, rows: int, width: int) -> torch.Tensor:
    return torch.rand(rows, width, dtype=torch.float64)


def signs(draw: Draw, rows: int, width: int) -> torch.Tensor:
    return unit(draw, rows, width).round() * 2 - 1


def classes(draw: Draw, rows: int, width: int) -> torch.Tensor:
    """Class numbers, many of them ignored, but not all."""
    labels = torch.randint(width, (rows,))
    if draw.maybe(0.7):
        labels[torch.rand(rows) < draw.choice((0.2, 0.6))] = -100
        labels[draw.randrange(rows)] = 0
    return labels


def probabilities(draw: Draw, rows: int, width: int) -> torch.Tensor:
    return numbers(draw, rows, width).softmax(-1)


def multiclass(draw: Draw, rows: int, width: int) -> torch.Tensor:
    target = torch.randint(width, (rows, width))
    target[:, draw.randrange(1, width) :] = -1
    return target


def torch_losses(width: int, reduction: str) -> tuple[Entry, ...]:
    """Every loss of torch of two arguments, with the targets that it takes."""
    weight = torch.rand(width, dtype=torch.float64) + 0.1
    further: dict[str, Any] = {} if reduction == "mean" else {"reduction": reduction}
    return (
        (lambda: nn.CrossEntropyLoss(**further), classes),
        (lambda: nn.CrossEntropyLoss(weight=weight, **further), classes),
        (lambda: nn.CrossEntropyLoss(label_smoothing=0.1, **further), classes),
        (lambda: nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2, **further), classes),
        (lambda: nn.CrossEntropyLoss(ignore_index=0, **further), lambda d, n, w: (torch.arange(n) + 1) % w),
        (lambda: nn.CrossEntropyLoss(**further), probabilities),
        (lambda: nn.NLLLoss(weight=weight, **further), classes),
        (lambda: partial(F.cross_entropy, **further), classes),
        (lambda: partial(F.cross_entropy, weight=weight, label_smoothing=0.1, **further), classes),
        (lambda: partial(F.nll_loss, ignore_index=-100, **further), classes),
        (lambda: nn.MSELoss(**further), numbers),
        (lambda: nn.L1Loss(**further), numbers),
        (lambda: nn.SmoothL1Loss(**further), numbers),
        (lambda: nn.HuberLoss(**further), numbers),
        (lambda: partial(F.huber_loss, delta=0.5, **further), numbers),
        (lambda: nn.BCEWithLogitsLoss(pos_weight=weight, **further), unit),
        (lambda: nn.KLDivLoss(**further), probabilities),
        (lambda: nn.PoissonNLLLoss(**further), unit),
        (lambda: nn.SoftMarginLoss(**further), signs),
        (lambda: nn.HingeEmbeddingLoss(**further), signs),
        (lambda: nn.MultiLabelSoftMarginLoss(**further), unit),
        (lambda: nn.MultiLabelMarginLoss(**further), multiclass),
        (lambda: nn.MultiMarginLoss(**further), lambda d, n, w: torch.randint(w, (n,))),
    )


def whole(
    draw: Draw, width: int, loss: Callable[..., Any], target: Callable[..., torch.Tensor], **further: Any
) -> Case:
    """A network in float64 that must do as torch does on the whole mini-batch."""
    layers = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, width)]
    batches = [
        (torch.randn(draw.rows, width, dtype=torch.float64), target(draw, draw.rows, width))
        for _ in range(draw.steps)
    ]
    return Case([layer.double() for layer in layers], batches, loss=loss, oracle="whole", ways=("step",), **further)


@kind("S13")
def s13_torch_losses(draw: Draw) -> Case:
    """Losses of torch under the default reduction: as torch on the whole mini-batch."""
    width = draw.choice((3, 4, 5, 8))
    make, target = draw.choice(torch_losses(width, draw.choice(("mean", "mean", "sum"))))
    return whole(draw, width, make(), target)


@kind("S13")
def s13_batchmean_and_functions(draw: Draw) -> Case:
    width = draw.choice((3, 4, 5, 8))
    choices: tuple[tuple[Any, Callable[..., torch.Tensor]], ...] = (
        (nn.KLDivLoss(reduction="batchmean"), probabilities),
        (F.cross_entropy, classes),
        (F.nll_loss, classes),
        (F.mse_loss, numbers),
        (F.l1_loss, numbers),
        (F.smooth_l1_loss, numbers),
        (F.binary_cross_entropy_with_logits, unit),
        (F.soft_margin_loss, signs),
        (F.multi_margin_loss, lambda d, n, w: torch.randint(w, (n,))),
    )
    return whole(draw, width, *draw.choice(choices))


@kind("S13")
def s13_places_of_images(draw: Draw) -> Case:
    """Cross entropy over places, (rows, classes, places), with ignored labels of uneven number."""
    count, places = draw.choice((3, 5)), draw.choice((2, 4, 7))
    weight = (torch.rand(count, dtype=torch.float64) + 0.1) if draw.maybe() else None
    loss = draw.choice((nn.CrossEntropyLoss(weight=weight), nn.CrossEntropyLoss(weight=weight, reduction="sum")))
    layers = [nn.Conv1d(2, count, 1), nn.Tanh(), nn.Conv1d(count, count, 1)]

    def labels() -> torch.Tensor:
        target = torch.randint(count, (draw.rows, places))
        target[torch.rand(draw.rows, places) < 0.5] = -100
        target[draw.randrange(draw.rows), 0] = 0
        return target

    batches = [(torch.randn(draw.rows, 2, places, dtype=torch.float64), labels()) for _ in range(draw.steps)]
    return Case([layer.double() for layer in layers], batches, loss=loss, oracle="whole", ways=("step",))


@kind("S13")
def s13_unreadable(draw: Draw) -> Case:
    """A loss that cannot be read, over integer targets that hold -100: one warning with the remedy."""
    count, length = draw.choice((3, 5)), draw.choice((2, 3, 6))
    inner = nn.CrossEntropyLoss()
    losses: tuple[Callable[..., torch.Tensor], ...] = (
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
        lambda o, t: F.cross_entropy(o.transpose(1, 2), t),
        lambda o, t: inner(o.reshape(-1, count), t.reshape(-1)),
        lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t.flatten()),
    )
    batches = tokens(draw, count, length)
    for _, target in batches:
        target[torch.rand(target.shape) < 0.3] = -100
        target[:, 0] = 0
    batches[0][1][0, 1] = -100
    layers = [nn.Embedding(count, 4), nn.Linear(4, count)]
    words = (r"-100|ignore", r"reduction")
    return Case(
        layers,
        batches,
        loss=draw.choice(losses),
        ways=("step",),
        told=words,
        must_tell=min(draw.micro_batches, draw.rows) > 1,
    )


def valid(target: torch.Tensor) -> torch.Tensor:
    return (target >= 0).sum()


@kind()
def weighted_reduction(draw: Draw) -> Case:
    """A function of the target weighs micro-batches; those of weight 0 have no say, even if their loss is NaN."""
    count, length = draw.choice((3, 5)), draw.choice((1, 2, 4))
    layers = [nn.Embedding(count, 4), nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, count)]
    batches = tokens(draw, count, length)
    for _, target in batches:
        target[torch.rand(target.shape) < 0.5] = -100
        target[0, 0] = 1

    def loss(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(o.flatten(0, 1), t.flatten())

    return Case(layers, batches, loss=loss, reduction=valid, ways=("step",))


@kind()
def reductions_and_scale(draw: Draw) -> Case:
    width = draw.width()
    scale = draw.choice((1.0, 2.0, 0.3, 1024.0, 65536.0))
    case = network(draw, width, [plain(draw, width), plain(draw, width)], ways=("step",))
    case.batches = mini_batches(draw, width)
    case.reduction, case.scale = draw.choice(("sum", "mean", lambda t: float(len(t)))), scale
    return case
