"""Hooks on gradients, and gradients that are left out, are behind a cut as in the plain loop, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS
from tests.support.two_steps import CUTS, DRIVERS, REMAT, M, X, Y, check, network


def halves_what_comes_back(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


def halves_behind_a_view(x: Tensor) -> Tensor:
    view = x[:, 1:]
    if x.requires_grad:
        view.register_hook(lambda gradient: gradient * 0.5)
        x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return torch.cat([view, x[:, :1]], 1)


def hears_two_at_once(x: Tensor) -> Tensor:
    y = x * 2
    if x.requires_grad:
        torch.autograd.graph.register_multi_grad_hook((x, y), lambda gradients: None)
        x.register_hook(lambda gradient: gradient + 1)
    return y


def keeps_the_gradient(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.retain_grad()
    return x


HOOKS = [halves_what_comes_back, halves_behind_a_view, hears_two_at_once, keeps_the_gradient]


@CUTS
@DRIVERS
@REMAT
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_what_a_layer_is_given_fire_as_in_the_plain_loop(
    hook: Callable[[Tensor], Tensor], remat: str, driver: str, cut: list[int]
) -> None:
    check(network(hook, hook), cut, driver, remat)


@DRIVERS
@REMAT
def test_module_hooks_on_what_a_layer_is_given_fire_as_in_the_plain_loop(remat: str, driver: str) -> None:
    layers = network(lambda x: x, lambda x: x)

    def halved(module: nn.Module, ins: Any, outs: Any) -> Any:
        return tuple(gradient if gradient is None else gradient * 0.5 for gradient in ins)

    def before(module: nn.Module, args: tuple[Tensor]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: gradient * 3)

    for layer in layers[1:]:
        layer.register_forward_pre_hook(before)
        layer.register_full_backward_hook(halved)
    check(layers, [1, 1, 1, 1], driver, remat)


class Stop(torch.autograd.Function):
    """Lets no gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Times(torch.autograd.Function):
    """A product with a weight, which is given zeros where no gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Times.apply(x, self.weight)


class StopLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Stop.apply(x)


@DRIVERS
@REMAT
@pytest.mark.parametrize("cut", [[4], [1, 3], [2, 2], [3, 1], [1, 1, 1, 1]], ids=str)
def test_a_gradient_that_a_backward_leaves_out_is_left_out_behind_a_cut_too(
    cut: list[int], remat: str, driver: str
) -> None:
    layers = [Scale(), nn.Linear(4, 4), StopLayer(), nn.Linear(4, 4)]
    check(layers, cut, driver, remat)
    assert torch.equal(torch.zeros(4), layers[0].weight.grad)  # type: ignore[arg-type]  # not None, as in plain torch
    assert layers[1].weight.grad is None


def test_a_hook_that_would_see_a_part_of_a_gradient_is_refused() -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, (x * 2).sin()

    class Leans(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y, y.sin()

    class Hooks(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            if pair[0].requires_grad:
                pair[0].register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return pair[0] + pair[1]

    for remat in REMATS:
        check([nn.Linear(4, 4), Gives(), Hooks(), nn.Linear(4, 4)], [2, 2], "threads", remat)
        check([nn.Linear(4, 4), Leans(), Hooks(), nn.Linear(4, 4)], [1, 3], "threads", remat)
        pipe = gpipe.GPipe([nn.Linear(4, 4), Leans(), Hooks(), nn.Linear(4, 4)], [2, 2], M, remat=remat)
        with pytest.raises(RuntimeError, match="another tensor that crosses the cut with it was made from it"):
            pipe.step(X, Y, F.mse_loss)
