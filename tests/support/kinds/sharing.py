"""S8 and S9: blocks used several times, that know themselves, and weights used from elsewhere."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import Apply, mini_batches, plain, tokens
from .case import Case, Draw, kind


class Knows(nn.Module):
    """A block that keeps a way to itself."""

    act: Any

    def __init__(self, width: int, keep: Callable[["Knows"], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.act = keep(self)

    def inner(self, x: Tensor) -> Tensor:
        return self.a(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        act = self.act
        match act:
            case [inner] | {"act": inner} | types.SimpleNamespace(call=inner):
                act = inner
        return x + self.b(act(x))


def keep_parent(block: Knows) -> Any:
    object.__setattr__(block, "parent", block)
    return lambda x: block.parent.a(x)  # type: ignore[operator, union-attr]


def keep_others(block: Knows) -> Any:
    block.__dict__["others"] = [block, block.a]
    return block.inner


def hook_itself(block: Knows) -> Any:
    block.a.register_forward_hook(lambda module, args, out: out + 0.0 * block.b.bias.sum())
    return block.inner


WAYS: tuple[Callable[[Knows], Any], ...] = (
    lambda block: block.inner,
    lambda block: lambda x: block.a(x).tanh(),
    lambda block: functools.partial(Knows.inner, block),
    lambda block: [block.inner],
    lambda block: {"act": lambda x: block.inner(x)},
    lambda block: types.SimpleNamespace(call=block.inner),
    lambda block: types.MethodType(lambda self, x: self.a(x).sigmoid(), block),
    lambda block: functools.partial(lambda linear, x: linear(x), block.a),
    lambda block: (functools.wraps(block.inner)(lambda x: block.inner(x)),),
    keep_parent,
    keep_others,
    hook_itself,
)


@kind("S8")
def s8_self_references(draw: Draw) -> Case:
    """A block used several times that keeps a bound method, lambda, partial or closure over itself."""
    width = draw.width()
    block = Knows(width, draw.choice(WAYS))
    layers: list[nn.Module] = [block, *(draw.choice((block, plain(draw, width))) for _ in range(3)), block]
    return Case(layers, mini_batches(draw, width), oracle="shared")


@kind("S8")
def s8_hooks_over_self(draw: Draw) -> Case:
    """Hooks that are bound to the block, or to its parent."""
    width = draw.width()
    first, last = nn.Linear(width, width), nn.Linear(width, width)
    block = nn.Sequential(first, nn.Tanh(), last)
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
        weight, reference = owner.weight, weakref.ref(owner.weight)
        self.__dict__["owner"] = owner if how == 0 else None
        self.table = {"w": weight} if how == 1 else {}
        self.holder = types.SimpleNamespace(owner=owner if how == 2 else None)
        held = [owner]
        gets: tuple[Callable[[], Any], ...] = (
            lambda: self.__dict__["owner"].weight,
            lambda: self.table["w"],
            lambda: self.holder.owner.weight,
            lambda: held[0].weight,
            lambda: weight,
            functools.partial(getattr, owner, "weight"),
            reference,
        )
        self.get = gets[how]

    def forward(self, x: Tensor) -> Tensor:
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
    losses: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
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
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@kind("errors")
def sparse_tied(draw: Draw) -> Case:
    count, length, width = draw.choice((5, 11)), draw.choice((1, 3)), draw.choice((4, 7))
    embedding = nn.Embedding(count, width, sparse=True)
    layers = [embedding, *(plain(draw, width) for _ in range(draw.randint(0, 3))), Head(embedding.weight)]
    batches = [(x.squeeze(1), y.squeeze(1)) if length == 1 else (x, y) for x, y in tokens(draw, count, length)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.reshape(-1, count), target.reshape(-1))

    return Case(layers, batches, loss=loss, oracle="shared")


@kind()
def sparse_embedding(draw: Draw) -> Case:
    """Sparse gradients of an embedding that is not tied."""
    count, width = draw.choice((5, 11)), draw.choice((4, 7))
    first = [nn.Embedding(count, width, sparse=True), Apply(lambda x: x.mean(1))]
    if draw.maybe():
        first = [nn.EmbeddingBag(count, width, sparse=True)]
    batches = [(draw.labels(draw.rows, 4, classes=count), torch.randn(draw.rows, 3)) for _ in range(draw.steps)]
    return Case([*first, plain(draw, width), nn.Linear(width, 3)], batches)
