"""Draws in a backward are refused unless a recomputation repeats them (those: `tests.support.kinds.recompute`)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpipe
from tests.support.plain_loop import REMATS, same_bits, train

M, WIDTH = 3, 6
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def draw(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x).tanh(), 0.3) * (1 + torch.rand_like(x))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 2, generator=generator)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_without_its_state_a_checkpoint_that_draws_is_refused(driver: str, use_reentrant: bool) -> None:
    class Forgets(Layer):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.draw, x, use_reentrant=use_reentrant, preserve_rng_state=False)
            return out

    pipe = gpipe.GPipe([nn.Linear(WIDTH, WIDTH), Forgets()], 2, M, driver=driver, seed=7)
    with pytest.raises(RuntimeError, match=r"preserve_rng_state=False") as caught:
        pipe.step(data()[0], data()[0], F.mse_loss)
    assert "layer 1 (1: Forgets)" in "\n".join(caught.value.__notes__)
    with torch.no_grad():  # nothing is recomputed
        pipe(data()[0])


def test_a_scope_inside_of_a_checkpoint_needs_no_state() -> None:
    layer = Layer()

    def drawn(x: Tensor) -> Tensor:
        with gpipe.rng_scope(1, 2, 3, 4):
            return layer.draw(x)

    gradients = []
    for use in (None, True, False):
        x = data()[0].requires_grad_()
        out: Any = drawn(x) if use is None else checkpoint(drawn, x, use_reentrant=use, preserve_rng_state=False)
        out.sum().backward()
        gradients.append(x.grad)
    assert same_bits(gradients[0], gradients[1])
    assert same_bits(gradients[0], gradients[2])


# Draws in a backward that is no recompute.


class Noise(torch.autograd.Function):
    """Draws where no key is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient + torch.randn_like(gradient)


class RunsAgain(torch.autograd.Function):
    """Recomputes in the backward as RevNet and Reformer do, by the state of torch's generator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run, ctx.state = run, torch.get_rng_state()
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            out = ctx.run(x)
        torch.autograd.backward(out, gradient)
        return x.grad, None, None


def hooked(x: Tensor) -> Tensor:
    out = x.sin()
    out.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
    return out.cos()


class Draws(nn.Module):
    """Draws in the backward, in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inside = lambda x: F.dropout(self.linear(x), 0.5)  # noqa: E731
        match self.how:
            case "function":
                return Noise.apply(x)
            case "hook":
                return hooked(x)
            case "reversible":
                return RunsAgain.apply(x, inside, self.linear.weight)
            case "function in reentrant":
                return checkpoint(lambda x: Noise.apply(inside(x)), x, use_reentrant=True)
            case _:
                return checkpoint(lambda x: Noise.apply(inside(x)).sin(), x, use_reentrant=False)


WAYS = ["function", "hook", "reversible", "function in reentrant", "function in non-reentrant"]


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("how", WAYS)
def test_a_draw_in_a_backward_is_refused_at_once_and_its_layer_named(how: str, driver: str, partitions: int) -> None:
    for remat in REMATS:
        layers = [nn.Linear(WIDTH, WIDTH), Draws(how), nn.Linear(WIDTH, 2)]
        with gpipe.GPipe(layers, partitions, M, driver=driver, remat=remat, seed=7) as pipe:
            before = torch.get_rng_state()
            for way in ("step", "call"):
                with pytest.raises(RuntimeError, match=r"layer 1 \(1: Draws\) draws random numbers in its backward"):
                    train(pipe, *data(), F.mse_loss, way)
            if how != "reversible":  # which itself moves it, and puts it back
                assert torch.equal(torch.get_rng_state(), before)
