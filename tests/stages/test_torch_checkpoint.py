"""Randomness inside of `torch.utils.checkpoint`: the numbers of the same layers without it, however they are run."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpipe
from tests.support.plain_loop import REMATS, assert_same_bits, plain_loop, same_bits, train, train_plainly

M, WIDTH = 3, 6
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

Function = Callable[[Tensor], Tensor]
Wrap = Callable[[Function, Tensor], Tensor]


def without(function: Function, x: Tensor) -> Tensor:
    return function(x)


def reentrant(function: Function, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(function, x, use_reentrant=True)
    return out


def saving(function: Function, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(function, x, use_reentrant=False)
    return out


def thorough(function: Function, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(function, x, use_reentrant=False, early_stop=False)
    return out


KINDS: dict[str, tuple[Wrap, Wrap]] = {  # how the outer and the inner function of a layer are wrapped
    "reentrant": (reentrant, without),
    "non-reentrant": (saving, without),
    "without early stop": (thorough, without),
    "inner reentrant": (without, reentrant),
    "inner non-reentrant": (without, saving),
    "reentrant in reentrant": (reentrant, reentrant),
    "non-reentrant in non-reentrant": (saving, saving),
    "reentrant in non-reentrant": (saving, reentrant),
    "non-reentrant in reentrant": (reentrant, saving),
}


class Layer(nn.Module):
    """Draws before, inside, in an inner function, after that, in a second one, and behind it all.

    Each weight is used once: a reentrant checkpoint adds up the gradients of several uses in another order.
    """

    def __init__(self, outer: Wrap, inner: Wrap) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.normal = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def deep(self, at: int, x: Tensor) -> Tensor:
        return F.dropout(self.linears[at](x).tanh(), 0.3) * (1 + torch.rand_like(x))

    def middle(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linears[0](x), 0.2).sin()
        x = self.inner(partial(self.deep, 1), x) + torch.randn(x.shape)
        x = self.inner(partial(self.deep, 2), x) * torch.bernoulli(torch.full((len(x), 1), 0.8))
        out: Tensor = self.normal(x[:, torch.randperm(WIDTH)])
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1)
        x = self.outer(self.middle, x) + self.outer(partial(self.deep, 3), x)
        return F.rrelu(x, training=True)


def network(outer: Wrap, inner: Wrap) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), Layer(outer, inner), nn.GELU(), Layer(outer, inner), nn.Linear(WIDTH, 2)]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 2, generator=generator)


# Laws.


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_gives_the_bits_of_the_layers_without_checkpoints(kind: str) -> None:
    layers, plain = network(*KINDS[kind]), network(without, without)
    before = torch.get_rng_state()
    for step in (0, 1):
        losses = [
            plain_loop(some, *data(), F.mse_loss, micro_batches=M, seed=7, step=step) for some in (layers, plain)
        ]
        assert same_bits(*losses)
        assert_same_bits(nn.Sequential(*layers), plain)
    assert torch.equal(torch.get_rng_state(), before)


@contextmanager
def drawing_elsewhere() -> Iterator[None]:
    """Another thread of the user's, that draws from torch all the while."""
    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            torch.rand(3)

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("around", [nullcontext, drawing_elsewhere])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_gives_the_bits_of_the_layers_without_checkpoints(
    kind: str, driver: str, around: Callable[[], AbstractContextManager[None]]
) -> None:
    ways = [([5], "step"), ([2, 3], "step"), ([1, 1, 1, 1, 1], "call"), ([3, 2], "call")]
    for remat, (cut, way) in zip(REMATS, ways, strict=True):
        layers, plain = network(*KINDS[kind]), network(without, without)
        with gpipe.GPipe(layers, cut, M, remat=remat, driver=driver, seed=7) as pipe, around():
            before = torch.get_rng_state()
            for step in (0, 1):
                loss = train_plainly(plain, *data(), F.mse_loss, way, micro_batches=M, seed=7, step=step)
                assert same_bits(train(pipe, *data(), F.mse_loss, way), loss)
                assert_same_bits(pipe, plain)
            assert around is drawing_elsewhere or torch.equal(torch.get_rng_state(), before)


# Examples.


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_without_its_state_a_checkpoint_that_draws_is_refused(driver: str, use_reentrant: bool) -> None:
    class Forgets(Layer):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.deep, 0, x, use_reentrant=use_reentrant, preserve_rng_state=False)
            return out

    pipe = gpipe.GPipe([nn.Linear(WIDTH, WIDTH), Forgets(without, without)], 2, M, driver=driver, seed=7)
    with pytest.raises(RuntimeError, match=r"preserve_rng_state=False") as caught:
        pipe.step(data()[0], data()[0], F.mse_loss)
    assert "layer 1 (1: Forgets)" in "\n".join(caught.value.__notes__)
    with torch.no_grad():  # nothing is recomputed
        pipe(data()[0])


def test_a_scope_inside_of_a_checkpoint_needs_no_state() -> None:
    layer = Layer(without, without)

    def drawn(x: Tensor) -> Tensor:
        with gpipe.rng_scope(1, 2, 3, 4):
            return layer.deep(0, x)

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
    def forward(ctx: Any, x: Tensor, run: Function, weight: Tensor) -> Tensor:
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
                return reentrant(lambda x: Noise.apply(inside(x)), x)
            case _:
                return saving(lambda x: Noise.apply(inside(x)).sin(), x)


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
