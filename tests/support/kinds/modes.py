"""Switches in mid-run: training and evaluation, gradients on and off, what is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .blocks import Apply, network, plain
from .case import Case, Draw, kind


@kind()
def train_and_eval(draw: Draw) -> Case:
    """Between steps the whole, or a layer, is put into evaluation mode and back."""
    width = draw.width()
    draw.steps = 3
    case = network(draw, width, [nn.Dropout(0.4), plain(draw, width), nn.Dropout(0.2)])
    whole = draw.maybe()

    def switch(trainer: Any, step: int) -> None:
        if whole:
            trainer.train(not trainer.model.training)
        else:
            layer = next(m for m in trainer.model.modules() if isinstance(m, nn.Dropout))
            layer.train(not layer.training)

    case.between = switch
    return case


@kind()
def validation_between(draw: Draw) -> Case:
    """Steps or calls under no_grad or inference_mode between training steps."""
    width = draw.width()
    draw.steps = 3
    seen: list[torch.Tensor] = []
    case = network(draw, width, [nn.Dropout(0.3), plain(draw, width)], extra=lambda: {"validation": list(seen)})
    mode: Callable[[], torch.no_grad | torch.inference_mode] = draw.choice((torch.no_grad, torch.inference_mode))
    evaluating, stepping = draw.maybe(0.7), draw.maybe()

    def validate(trainer: Any, step: int) -> None:
        x, y = case.batches[step]
        trainer.train(not evaluating)
        with mode():
            seen.append((trainer.step(x, y) if stepping else trainer.forward(x)).clone())
        trainer.train()

    case.between = validate
    return case


@kind()
def eval_with_gradients(draw: Draw) -> Case:
    """A backward in evaluation mode, as for saliency or fine tuning."""
    width = draw.width()
    case = network(draw, width, [nn.Dropout(0.4), plain(draw, width)])
    case.begin = lambda trainer: trainer.train(False)
    return case


@kind()
def requires_grad_toggled(draw: Draw) -> Case:
    """Parameters are frozen and thawed between steps, and gradients set to None or zero."""
    width = draw.width()
    draw.steps = 3
    case = network(draw, width, [nn.Linear(width, width), plain(draw, width)])
    zero = draw.maybe()
    which = [draw.random() < 0.5 for _ in range(40)]

    def toggle(trainer: Any, step: int) -> None:
        for chosen, p in zip(which, list(trainer.model.parameters())[:-1], strict=False):
            if chosen:
                p.requires_grad_(not p.requires_grad)
        trainer.model.zero_grad(set_to_none=not zero)

    case.between = toggle
    return case


@kind()
def accumulating_steps(draw: Draw) -> Case:
    """Two steps before the optimizer's: gradients add, as in torch."""
    width = draw.width()
    draw.steps = draw.choice((2, 3))
    case = network(draw, width, [plain(draw, width), plain(draw, width)])
    case.optimize = lambda step: step % 2 == 1
    return case


@kind()
def no_grad_within(draw: Draw) -> Case:
    """Layers that switch gradients off and on by themselves."""
    width = draw.width()

    def without(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.norm()
        return x / (scale + 1)

    def inner(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(z.pow(3).sum(), z)
        return x + 0.01 * g

    def inference(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scale = (x * 2).sum().item()
        return x * (1 + 0.001 * scale)

    options = (without, inner, inference, torch.no_grad()(lambda x: x * 2))
    core = [Apply(draw.choice(options)), plain(draw, width), Apply(draw.choice(options))]
    return network(draw, width, core)


@kind()
def grown_and_cut(draw: Draw) -> Case:
    """Between steps the learning rate, a momentum, a module's attribute or a weight is changed by hand."""
    width = draw.width()
    draw.steps = 3
    case = network(draw, width, [nn.LeakyReLU(0.1), nn.LayerNorm(width), plain(draw, width)])
    how = draw.randint(0, 2)

    def change(trainer: Any, step: int) -> None:
        match how:
            case 0:
                next(m for m in trainer.model.modules() if isinstance(m, nn.LeakyReLU)).negative_slope *= 2
            case 1:
                with torch.no_grad():
                    for p in trainer.model.parameters():
                        p.mul_(0.9)
            case _:
                for p in trainer.model.parameters():
                    p.data = p.data.clone() * 1.1

    case.between = change
    return case
