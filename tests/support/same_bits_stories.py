"""Same bits as stories: one script each, for a pipe over processes, a local one, or the plain loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.networks import (
    WIDTH,
    WORDS,
    data,
    network,
    normed,
    squared,
    with_metrics,
    words,
)
from tests.support.odd_layers import Pop, Stash
from tests.support.outcomes import Outcome, noted, optimizer_of
from tests.support.plain_loop import Loop, weights_of

SEED, MICRO_BATCHES = 3, 4

Make: TypeAlias = Callable[..., Any]
"""Makes a pipe of layers and keyword arguments of `GPipe`."""


def steps(pipe: Any, shapes: Sequence[tuple[int, ...]], optimizer: torch.optim.Optimizer | None = None) -> Outcome:
    """Steps of these shapes; the gradients of each are added to those before, unless an optimizer uses them up."""
    found: Outcome = {}
    for step, shape in enumerate(shapes):
        found[f"{step} loss"] = pipe.step(*data(step, *shape), F.mse_loss)
        found |= noted(pipe, step)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return found


def shapes_change(make: Make) -> Outcome:
    """Rows and lengths that change from step to step; fewer rows than M, and one."""
    pipe = make(network())
    found = steps(pipe, [(10, 3), (7, 5), (3, 1), (1, 4), (13, 2), (2, 40)], optimizer_of(pipe))
    return found | noted(pipe, "end")


def one_dimension_more(make: Make) -> Outcome:
    return steps(make(network()), [(9,), (9, 2), (6, 2, 3), (9,)])


def not_contiguous(make: Make) -> Outcome:
    pipe = make(network())
    found: Outcome = {}
    for step, shape in enumerate([(10, 2), (10, 3)]):
        x, y = data(step, *shape)
        found[f"{step} loss"] = pipe.step(x.mT.contiguous().mT, y, F.mse_loss)
    return found | noted(pipe, "end")


def deferred_batch_norm(make: Make) -> Outcome:
    pipe = make(normed(), batch_norm="deferred")
    found = steps(pipe, [(13,), (9,)])
    loss = F.mse_loss(pipe(data(2, 8)[0], gather=True), data(2, 8)[1])
    loss.backward()
    found |= noted(pipe, "call")
    pipe.eval()
    with torch.no_grad():
        found["evaluation"] = pipe(data(5, 10)[0], gather=True)
    return found


class Twice(nn.Module):
    """Pops a value that another layer pops again."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.pop = names
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **popped: Tensor) -> Tensor:
        return self.linear(x) * torch.stack([tensor.tanh() for tensor in popped.values()]).sum(0)


def skips(make: Make) -> Outcome:
    """Over one stage and over several; several pops of one stash; two at once."""
    with weights_of(2):
        layers: list[nn.Module] = [
            Stash("a", WIDTH), nn.Dropout(0.3), Stash("b", WIDTH), Twice("a"),
            nn.Linear(WIDTH, WIDTH), Twice("a", "b"), Pop({"b": WIDTH}, WIDTH), Twice("a"),
        ]  # fmt: skip
    return steps(make(layers), [(10,), (3,)])


def train_words(pipe: Any) -> Outcome:
    """Two optimizer steps, one of them behind two mini-batches."""
    found: Outcome = {}
    optimizer = adam_of(pipe)
    for step, rows in enumerate((10, 3, 8)):
        found[f"{step} loss"] = pipe.step(*words(step, rows), squared)
        found |= noted(pipe, step)
        if step:
            optimizer.step()
            optimizer.zero_grad()
    loss = squared(pipe(words(3, 7)[0], gather=True), words(3, 7)[1])
    loss.backward()
    return found | noted(pipe, "call")


def adam_of(pipe: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([*pipe.parameters()] or [torch.zeros(1)], lr=0.05)


def tied_by_name(make: Make) -> Outcome:
    """Layers that each process builds by itself: the copies have the value of the first."""
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Embedding(WORDS, WIDTH),
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.Dropout(0.2),
        lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Tanh,
        lambda: nn.Linear(WIDTH, WORDS),
    ]
    return train_words(make(makers, ties=[("0.weight", "5.weight"), ("1.weight", "3.weight")]))


def autocast(make: Make) -> Outcome:
    pipe = make(network())
    with torch.autocast("cpu", torch.bfloat16):
        return steps(pipe, [(10,), (3,)])


def metrics(make: Make) -> Outcome:
    pipe = make(network())
    found: Outcome = {}
    for step, rows in enumerate((10, 3)):
        x, y = data(step, rows)
        found[f"{step} loss"], told = pipe.step(x, y, with_metrics)
        assert [one["of rows"][1] for one in told] == [len(part) for part in x.tensor_split(min(MICRO_BATCHES, rows))]
        assert all(one["none"] is None for one in told)
        for m, one in enumerate(told):
            found |= {f"{step} worst {m}": one["worst"], f"{step} rows {m}": one["of rows"][0]}
    with torch.no_grad():
        found["validation"], (told, *_) = pipe.step(*data(4, 5), with_metrics)
    return found | {"worst": told["worst"]}


def calls(make: Make) -> Outcome:
    """Two forwards before two backwards, and one whose output is dropped; an input that wants a gradient."""
    found: Outcome = {}
    pipe = make(network())
    (x, y), (x2, y2) = data(0, 10), data(1, 3)
    x2.requires_grad_()
    one, other = pipe(x, gather=True), pipe(x2, gather=True)
    pipe(x, gather=True)
    loss2 = F.mse_loss(other, y2)
    loss2.backward()
    found |= noted(pipe, "second")
    loss = F.mse_loss(one * 2, y)
    loss.backward()
    found |= noted(pipe, "first")
    return found | {"loss": loss, "loss 2": loss2, "output": one, "0 input 0": x2.grad}


def without_gradients(make: Make) -> Outcome:
    """In training mode randomness goes on, in evaluation not."""
    pipe = make(network())
    found: Outcome = {}
    with torch.no_grad():
        found["begins"] = pipe.eval()(data(3, 10)[0], gather=True)
        pipe.train()
        found["trains"] = pipe(data(0, 10)[0], gather=True)
        found["validates"] = pipe.step(*data(1, 10), F.mse_loss)
    found["loss"] = pipe.step(*data(2, 10), F.mse_loss)
    pipe.eval()
    with torch.no_grad():
        found["evaluates"] = pipe(data(0, 3)[0], gather=True)
    pipe.train()
    found["again"] = pipe.step(*data(2, 10), F.mse_loss)
    return found | noted(pipe, "end")


def clipping(make: Make) -> Outcome:
    pipe = make(network())
    found: Outcome = {}
    optimizer = adam_of(pipe)
    for step, (most, kind) in enumerate([(0.1, 2.0), (100.0, 2.0), (0.05, float("inf")), (0.2, 1.0)]):
        found[f"{step} loss"] = pipe.step(*data(step, 10), F.mse_loss)
        found[f"{step} norm"] = pipe.clip_grad_norm_(most, kind)
        found |= noted(pipe, step)
        optimizer.step()
    return found


def double(make: Make) -> Outcome:
    pipe = make([layer.double() for layer in network()])
    x, y = data(0, 10)
    found: Outcome = {"loss": pipe.step(x.double(), y.double(), F.mse_loss)}
    return found | noted(pipe, "end")


def built_lazily(make: Make) -> Outcome:
    """Callables: the weights do not depend on who builds them."""
    makers = [
        lambda: nn.Linear(WIDTH, 40), nn.Tanh, lambda: nn.Sequential(nn.Linear(40, 7), nn.Dropout(0.4)),
        lambda: nn.Linear(7, 30), lambda: nn.BatchNorm1d(30), lambda: nn.Linear(30, WIDTH),
    ]  # fmt: skip
    found: Outcome = {}
    pipe = make(makers)
    found |= noted(pipe, "begin")
    found["loss"] = pipe.step(*data(0, 11), F.mse_loss)
    return found | noted(pipe, "end")


def frozen(make: Make) -> Outcome:
    """Nothing to train in front, so that no gradient goes there."""
    layers = network()
    for layer in layers[:4]:
        layer.requires_grad_(False)
    return steps(make(layers), [(10,), (3,)])


def grow_and_shrink(make: Make) -> Outcome:
    """Messages of a few bytes up to some hundred KiB, and back."""
    with weights_of(4):
        pipe = make([nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()])
    rows = (1, 5000, 30, 20_000, 9, 60_000, 3, 40_000, 4000, 5000, 1)
    return steps(pipe, [(n,) for n in rows])


@dataclass(frozen=True)
class Story:
    """A script, and whether the plain loop can follow it."""

    run: Callable[[Make], Outcome]
    plain: bool


STORIES: Mapping[str, Story] = {
    script.__name__: Story(script, plain)
    for script, plain in [
        (shapes_change, True), (one_dimension_more, True), (not_contiguous, True), (deferred_batch_norm, False),
        (skips, True), (tied_by_name, False), (autocast, True), (metrics, False), (calls, False),
        (without_gradients, True), (clipping, False), (double, True), (built_lazily, False), (frozen, True),
        (grow_and_shrink, True),
    ]
}  # fmt: skip


def maker(partitions: int, **settings: Any) -> Make:
    def make(layers: Any, **how: Any) -> gpipe.GPipe:
        return gpipe.GPipe(layers, partitions, MICRO_BATCHES, seed=SEED, **settings, **how)

    return make


def plain(layers: Sequence[nn.Module], **how: Any) -> Loop:
    """The reference loop, for a story that it can follow."""
    return Loop(layers, MICRO_BATCHES, SEED)
