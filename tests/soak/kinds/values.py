"""What flows between layers beside tensors of floats, and skip connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gpipe

from ..blocks import Apply, mini_batches, network, plain, touchy
from ..case import Case, Draw, kind


class Stashes(nn.Module):
    """Stashes its input, or something made of it, under some names."""

    def __init__(self, names: tuple[str, ...], make: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.stash, self.make = names, make

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return x * 1.5, {name: self.make(x * (1 + i)) for i, name in enumerate(self.stash)}


class Pops(nn.Module):
    """Adds what it pops, whatever it is."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.pop = names

    def forward(self, x: torch.Tensor, **popped: Any) -> torch.Tensor:
        for name in self.pop:
            for leaf in torch.utils._pytree.tree_leaves(popped[name]):
                if isinstance(leaf, torch.Tensor):
                    x = x + 0.1 * (leaf.float().mean() if leaf.shape != x.shape else leaf)
        return x


def stashed_values() -> tuple[Callable[[torch.Tensor], Any], ...]:
    """What may be stashed."""
    return (
        lambda x: x,
        lambda x: x.tanh(),
        lambda x: x[:, 1:],
        lambda x: x.detach(),
        lambda x: x.argmax(-1),
        lambda x: x.transpose(0, 1),
        lambda x: x.sum(),
        lambda x: x.mean(1, keepdim=True).expand(x.shape),
        lambda x: x > 0,
    )


@kind()
def skip_connections(draw: Draw) -> Case:
    """Skips over stages: several names, several pops, layers that do both."""
    width = draw.width()
    makes = stashed_values()
    core: list[nn.Module] = [Stashes(("a", "b"), draw.choice(makes)), plain(draw, width), Pops(("a",))]
    core += [Stashes(("c",), draw.choice(makes)), touchy(), Pops(("b", "a")), plain(draw, width), Pops(("c",))]
    return network(draw, width, core)


@kind()
def skip_of_none(draw: Draw) -> Case:
    """A stash of None, at times."""
    width, always = draw.width(), draw.maybe()
    core: list[nn.Module] = [Stashes(("a",), lambda x: None if always or x.sum() > 0 else x), plain(draw, width)]
    return network(draw, width, [*core, Pops(("a",)), plain(draw, width), Pops(("a",))])


@kind()
def skips_in_sequential(draw: Draw) -> Case:
    """`gpipe.Sequential` with skips, given whole."""
    width = draw.width()
    layers = [nn.Linear(width, width), Stashes(("a",)), plain(draw, width), Pops(("a",)), nn.Linear(width, width)]
    return Case(gpipe.Sequential(*layers), mini_batches(draw, width))


@kind()
def values_between(draw: Draw) -> Case:
    """Integers, booleans, None, strings, numbers and dicts beside the main tensor."""
    width = draw.width()
    put: Callable[[torch.Tensor], Any]
    take: Callable[[Any], torch.Tensor]
    options: tuple[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], ...] = (
        (lambda x: (x, x.argsort(1)), lambda v: v[0].gather(1, v[1])),
        (lambda x: {"x": x, "mask": x > 0, "none": None}, lambda v: v["x"].masked_fill(v["mask"], 0.5)),
        (lambda x: (x, "double", 2), lambda v: v[0] * v[2] if v[1] == "double" else v[0]),
        (lambda x: [x, x.shape[0], x.sum().item()], lambda v: v[0] / v[1] + v[2] * 0.01),
        (
            lambda x: (x, x.double(), x.half(), x.bfloat16()),
            lambda v: v[0] + v[1].float() + v[2].float() + v[3].float(),
        ),
        (lambda x: (x, x.sum(), x.new_zeros(0, 3)), lambda v: v[0] + v[1] + v[2].sum()),
        (lambda x: (x.unsqueeze(0), x.numel()), lambda v: v[0].squeeze(0) * v[1] ** -0.5),
        (lambda x: (None, x), lambda v: v[1]),
        (lambda x: ((x, (x, (x,))), slice(0, 2)), lambda v: v[0][1][1][0] + v[0][0][:, v[1]].sum()),
    )
    put, take = draw.choice(options)
    core = [nn.Linear(width, width), Apply(put), nn.Identity(), Apply(take), plain(draw, width)]
    return network(draw, width, core)


@kind()
def changing_values(draw: Draw) -> Case:
    """What flows changes with the micro-batch: a tuple or not, None or not, of another length or dtype."""
    width = draw.width()

    def put(x: torch.Tensor) -> Any:
        match int(x.detach().abs().sum() * 10) % 4:
            case 0:
                return x, None
            case 1:
                return x, x.sin()
            case 2:
                return x, {"a": x.long()}
            case _:
                return x, [x[:1], 3]

    def take(value: Any) -> torch.Tensor:
        x, rest = value
        return x + sum(
            (t.float().mean() for t in torch.utils._pytree.tree_leaves(rest) if torch.is_tensor(t)), x.new_zeros(())
        )

    return network(draw, width, [Apply(put), nn.Identity(), Apply(take), plain(draw, width)])


@kind()
def pytree_inputs(draw: Draw) -> Case:
    """Inputs and targets that are pytrees, with numbers, None, 0-dim tensors and `Whole`."""
    width = draw.width()

    def first(value: dict[str, Any]) -> torch.Tensor:
        x, extra = value["x"], value["more"]
        return x * extra[0] + extra[1].mean(0) * extra[3] + value["mask"].float()

    def batch() -> tuple[Any, Any]:
        more = (torch.tensor(0.7), gpipe.Whole(torch.randn(3, width)), None, 2.0)
        x = draw.data(draw.rows, width)
        return {"x": x, "more": more, "mask": x > 0}, (draw.data(draw.rows, width), {"w": 0.5})

    def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
        return (output - target[0]).pow(2).mean() * target[1]["w"]

    layers = [Apply(first), *(plain(draw, width) for _ in range(2)), nn.Linear(width, width)]
    return Case(layers, [batch() for _ in range(draw.steps)], loss=loss)


@kind()
def several_outputs(draw: Draw) -> Case:
    """The output is a pytree, of which the loss uses a part."""
    width = draw.width()
    used = draw.choice(("both", "first", "second"))

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        a, b = output["a"], output["more"][0]
        return {"both": (a * b - target), "first": a - target, "second": b - target}[used].pow(2).mean()

    case = network(draw, width, plain(draw, width), loss=loss)
    case.layers = [*case.layers, Apply(lambda x: {"a": x.tanh(), "more": [x.sin() * 2]})]
    return case


@kind()
def double_use(draw: Draw) -> Case:
    """A stage's output is used twice, and given again and again."""
    width = draw.width()
    core = [
        Apply(lambda x: (x, x)), Apply(lambda v: (v[0] * v[1], v[0])), Apply(lambda v: (v[1], v[0], v[1])),
        Apply(lambda v: v[0] * v[1] + v[2]),
    ]  # fmt: skip
    return network(draw, width, core, before=1)
