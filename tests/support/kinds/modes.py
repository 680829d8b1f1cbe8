"""Switches in mid-run: training and evaluation, gradients on and off, what is trained."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Apply, network, plain
from .case import Case, Draw, kind


def switching(draw: Draw, *core: Callable[[int], nn.Module], **further: Any) -> Case:
    """A network that is trained for three steps; something is done between them."""
    width, draw.steps = draw.width(), 3
    return network(draw, width, [*(make(width) for make in core), plain(draw, width)], **further)


def linear(width: int) -> nn.Module:
    return nn.Linear(width, width)


@kind()
def train_and_eval(draw: Draw) -> Case:
    """The whole, or a layer, is put into evaluation mode and back."""
    case, whole = switching(draw, lambda w: nn.Dropout(0.4), linear, lambda w: nn.Dropout(0.2)), draw.maybe()

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
    """Steps or calls under no_grad or inference_mode."""
    seen: list[Tensor] = []
    case = switching(draw, lambda w: nn.Dropout(0.3), extra=lambda: {"validation": list(seen)})
    mode: Callable[[], Any] = draw.choice((torch.no_grad, torch.inference_mode))
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
    return switching(draw, lambda w: nn.Dropout(0.4), begin=lambda trainer: trainer.train(False))


@kind()
def requires_grad_toggled(draw: Draw) -> Case:
    """Parameters are frozen and thawed, and gradients set to None or zero."""
    case, zero = switching(draw, linear), draw.maybe()
    which = [draw.random() < 0.5 for _ in range(40)]

    def toggle(trainer: Any, step: int) -> None:
        for chosen, p in zip(which, list(trainer.model.parameters())[:-1], strict=False):
            if chosen:
                p.requires_grad_(not p.requires_grad)
        trainer.model.zero_grad(set_to_none=not zero)

    case.between = toggle
    return case


@kind()
def no_grad_within(draw: Draw) -> Case:
    """Layers that switch gradients off and on by themselves."""

    def without(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.norm()
        return x / (scale + 1)

    def inner(x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(z.pow(3).sum(), z)
        return x + 0.01 * g

    def inference(x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = (x * 2).sum().item()
        return x * (1 + 0.001 * scale)

    options = (without, inner, inference, torch.no_grad()(lambda x: x * 2))
    return switching(draw, lambda w: Apply(draw.choice(options)), linear, lambda w: Apply(draw.choice(options)))


@kind()
def changed_by_hand(draw: Draw) -> Case:
    """A module's attribute or weights are changed."""
    case, how = switching(draw, lambda w: nn.LeakyReLU(0.1), nn.LayerNorm), draw.randint(0, 2)

    def change(trainer: Any, step: int) -> None:
        for module in trainer.model.modules():
            if how == 0 and isinstance(module, nn.LeakyReLU):
                module.negative_slope *= 2
        for p in trainer.model.parameters():
            if how == 1:
                p.data.mul_(0.9)
            elif how == 2:
                p.data = p.data.clone() * 1.1

    case.between = change
    return case
