"""Gradients across stage boundaries: of a backward within a forward, and of functions that reuse their memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe


class BackwardOfInput(nn.Module):
    """Has a backward of its own in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            x.sum().backward(retain_graph=True)
        return x


def with_backward(output: Tensor, target: Tensor) -> Tensor:
    loss = F.mse_loss(output, target)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize(("loss_fn", "who"), [(F.mse_loss, "a layer"), (with_backward, "loss_fn")])
def test_a_backward_inside_of_a_forward_is_refused_behind_a_cut(loss_fn: Any, who: str, remat: str) -> None:
    """Bug story: gradients of what the stage was given were lost, silently."""
    inner = BackwardOfInput() if who == "a layer" else nn.Tanh()
    pipe = gpipe.GPipe([nn.Linear(3, 3), inner, nn.Linear(3, 3)], [1, 2], 2, remat=remat)
    with pytest.raises(RuntimeError, match=rf"{who} calls backward\(\).*\[backward-inside-forward\]"):
        pipe.step(torch.randn(4, 3), torch.randn(4, 3), loss_fn)


WORKSPACE = torch.zeros(16, 4)


class Doubled(torch.autograd.Function):
    """Has one place for all gradients, as kernels do that allocate once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.mul(gradients[0], 2, out=WORKSPACE[: len(gradients[0])])


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Doubled.apply(x)
        return doubled


@pytest.mark.parametrize(("schedule", "remat"), [("gpipe", "never"), ("1f1b", "always"), ("zb_h1", "never")])
def test_bug_a_gradient_in_a_place_that_the_next_micro_batch_writes_is_the_plain_loops(
    schedule: str, remat: str
) -> None:
    """A function's workspace crossed to the stage before, which read it when the next backward had written it."""
    layers = [nn.Linear(4, 4), Double(), nn.Linear(4, 4)]
    with gpipe.GPipe(layers, [1, 2], 4, schedule=schedule, remat=remat, driver="lockstep") as pipe:
        assert pipe.verify(torch.randn(16, 4), torch.randn(16, 4), F.mse_loss, against="model").equal
