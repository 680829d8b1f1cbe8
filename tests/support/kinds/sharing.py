"""S8 and S9: blocks used several times, that know themselves, and weights used from elsewhere."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .blocks import mini_batches, plain, tokens
from .case import Case, Draw, kind


class Knows(nn.Module):
    """A block that keeps something over itself."""

    act: Any

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act: Any = self.act[0] if isinstance(self.act, list | tuple) else self.act
        act = act["act"] if isinstance(act, dict) else act
        act = act.call if isinstance(act, Holder) else act
        return x + self.b(act(x))


class Holder:
    """An object that holds a block's method."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.call = call


def keep(block: Knows, how: int) -> None:
    """Lets the block keep a reference to itself, of one sort or another."""
    match how:
        case 0:
            block.act = block.inner
        case 1:
            block.act = lambda x: block.a(x).tanh()
        case 2:
            block.act = functools.partial(Knows.inner, block)
        case 3:
            block.act = [block.inner]
        case 4:
            block.act = {"act": lambda x: block.inner(x)}
        case 5:
            block.act = Holder(block.inner)
        case 6:
            block.act = types.MethodType(lambda self, x: self.a(x).sigmoid(), block)
        case 7:
            block.act = functools.partial(lambda linear, x: linear(x), block.a)
        case 8:
            object.__setattr__(block, "parent", block)
            block.act = lambda x: block.parent.a(x)  # type: ignore[operator, union-attr]
        case 9:
            block.__dict__["others"] = [block, block.a]
            block.act = block.inner
        case 10:
            block.act = (functools.wraps(block.inner)(lambda x: block.inner(x)),)
        case _:
            block.act = block.inner
            block.a.register_forward_hook(lambda module, args, out: out + 0.0 * block.b.bias.sum())


@kind("S8")
def s8_self_references(draw: Draw) -> Case:
    """A block used several times that keeps a bound method, lambda, partial or closure over itself."""
    width = draw.width()
    block = Knows(width)
    keep(block, draw.randint(0, 11))
    layers: list[nn.Module] = [block, *(draw.choice((block, plain(draw, width))) for _ in range(3)), block]
    return Case(layers, mini_batches(draw, width), oracle="shared")


@kind("S8")
def s8_hooks_over_self(draw: Draw) -> Case:
    """Hooks that are bound to the block, or to its parent."""
    width = draw.width()
    first = nn.Linear(width, width)
    block = nn.Sequential(first, nn.Tanh(), nn.Linear(width, width))
    last: Any = block[2]
    hooks: tuple[Callable[..., Any], ...] = (
        lambda module, args, out: out * last.bias.sigmoid(),
        functools.partial(lambda outer, module, args, out: out + outer[0].bias, block),
        lambda module, args, out: out - module.bias.mean(),
    )
    first.register_forward_hook(draw.choice(hooks))
    if draw.maybe():
        block.register_forward_pre_hook(lambda module, args: (args[0] * first.weight.mean(),))
    layers = [block, *(plain(draw, width) for _ in range(draw.randint(0, 2))), block]
    return Case(layers, mini_batches(draw, width), oracle="shared")


@kind("S8")
def s8_several_modules(draw: Draw) -> Case:
    """One module several times, within others, under other names."""
    width = draw.width()
    shared = nn.Linear(width, width)
    choices: tuple[Callable[[], nn.Module], ...] = (
        lambda: shared,
        lambda: nn.Sequential(shared, nn.Tanh()),
        lambda: nn.Sequential(nn.ReLU(), nn.Sequential(shared)),
        lambda: plain(draw, width),
    )
    layers = [shared, *(draw.choice(choices)() for _ in range(draw.randint(1, 4))), nn.Sequential(shared, nn.Tanh())]
    return Case(layers, mini_batches(draw, width), oracle="shared")


class Uses(nn.Module):
    """Uses another layer's weight, through a reference that is not registered."""

    def __init__(self, owner: nn.Linear, how: int) -> None:
        super().__init__()
        weight = owner.weight
        match how:
            case 0:
                self.__dict__["owner"] = owner
                self.get = lambda: self.__dict__["owner"].weight
            case 1:
                held = [owner]
                self.get = lambda: held[0].weight
            case 2:
                self.get = lambda: weight
            case 3:
                self.table = {"w": weight}
                self.get = lambda: self.table["w"]
            case 4:
                self.get = functools.partial(getattr, owner, "weight")
            case 5:
                self.holder = types.SimpleNamespace(owner=owner)
                self.get = lambda: self.holder.owner.weight
            case _:
                reference = weakref.ref(weight)
                self.get = lambda: reference()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.get()).tanh()


@kind("S9")
def s9_unregistered_weight(draw: Draw) -> Case:
    """A weight of one layer is used by others through a reference that is no attribute of theirs."""
    width = draw.width()
    owner = nn.Linear(width, width, bias=False)
    draw.micro_batches = draw.choice((3, 5, 6))
    users = [Uses(owner, draw.randint(0, 6)) for _ in range(draw.randint(1, 2))]
    layers = [owner, plain(draw, width), *users, nn.Linear(width, width)]
    words = (r"layer \d", r"weight|parameter")
    return Case(layers, mini_batches(draw, width), oracle="shared", refusal=words)


@kind("S9")
def s9_weight_in_loss(draw: Draw) -> Case:
    """The loss uses a weight of a layer: a tied head, a regularizer."""
    width = draw.width()
    first, middle = nn.Linear(width, width, bias=False), nn.Linear(width, width)
    layers = [first, nn.Tanh(), middle, plain(draw, width), nn.Linear(width, width)]
    held = {"w": first.weight}
    losses: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
        lambda o, t: (o @ first.weight.t() - t).pow(2).mean(),
        lambda o, t: F.mse_loss(o, t) + 0.1 * first.weight.pow(2).sum(),
        lambda o, t: F.mse_loss(F.linear(o, held["w"]), t),
        lambda o, t: F.mse_loss(o, t) + sum(p.abs().sum() for p in middle.parameters()),
        functools.partial(lambda w, o, t: F.mse_loss(o @ w, t), first.weight),
        lambda o, t: F.mse_loss(first(o), t),
    )
    words = (r"loss", r"weight|parameter|layer \d")
    batches = mini_batches(draw, width)
    return Case(layers, batches, loss=draw.choice(losses), oracle="shared", refusal=words, ways=("step",))


class Head(nn.Module):
    """A head over a given weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


@kind("errors")
def sparse_tied(draw: Draw) -> Case:
    """A sparse embedding tied to the head."""
    count, length, width = draw.choice((5, 11)), draw.choice((1, 3)), draw.choice((4, 7))
    embedding = nn.Embedding(count, width, sparse=True)
    layers = [embedding, *(plain(draw, width) for _ in range(draw.randint(0, 3))), Head(embedding.weight)]
    batches = [(x.squeeze(1), y.squeeze(1)) if length == 1 else (x, y) for x, y in tokens(draw, count, length)]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.reshape(-1, count), target.reshape(-1))

    return Case(layers, batches, loss=loss, oracle="shared")


@kind()
def sparse_embedding(draw: Draw) -> Case:
    """Sparse gradients of an embedding that is not tied."""
    count, width = draw.choice((5, 11)), draw.choice((4, 7))
    bag = draw.maybe()
    first = nn.EmbeddingBag(count, width, sparse=True) if bag else nn.Embedding(count, width, sparse=True)
    core = [] if bag else [_MeanOfTokens()]
    layers = [first, *core, plain(draw, width), nn.Linear(width, 3)]
    batches = [(draw.labels(draw.rows, 4, classes=count), torch.randn(draw.rows, 3)) for _ in range(draw.steps)]
    return Case(layers, batches)


class _MeanOfTokens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


@kind()
def tied_parameters(draw: Draw) -> Case:
    """Parameters tied by identity: embeddings and heads, encoders and decoders, biases, through parametrizations."""
    width = draw.width()
    first, last = nn.Linear(width, width), nn.Linear(width, width)
    match draw.randint(0, 3):
        case 0:
            last.weight = first.weight
        case 1:
            last.bias = first.bias
        case 2:
            last.weight, last.bias = first.weight, first.bias
        case _:
            nn.utils.parametrizations.weight_norm(first)
            last = nn.Linear(width, width)
            last.bias = first.bias
    middle = [plain(draw, width) for _ in range(draw.randint(0, 3))]
    return Case([first, *middle, last, nn.Linear(width, width)], mini_batches(draw, width), oracle="shared")
