"""Wrong arguments and layers that cannot be: an error that names the true cause, in the user's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gpipe

from ..blocks import Apply
from ..case import Case, Draw, kind
from .values import Pops, Stashes

Change = Callable[[Case, Draw, int], None]
Misuse = tuple[tuple[str, ...], Change]


def option(name: str, *values: Any) -> Change:
    """Gives one argument of the pipe a wrong value."""

    def change(case: Case, draw: Draw, width: int) -> None:
        case.options[name] = draw.choice(values)

    return change


def layer(*makes: Callable[[int], Any]) -> Change:
    """Puts a wrong layer in the middle."""

    def change(case: Case, draw: Draw, width: int) -> None:
        case.layers = [*case.layers[:2], draw.choice(makes)(width), *case.layers[2:]]

    return change


def layers(make: Callable[[int], list[Any]]) -> Change:
    """Puts several layers in the middle."""

    def change(case: Case, draw: Draw, width: int) -> None:
        case.layers = [*case.layers[:2], *make(width), *case.layers[2:]]

    return change


def loss(*losses: Any) -> Change:
    """A wrong loss."""

    def change(case: Case, draw: Draw, width: int) -> None:
        case.loss, case.ways = draw.choice(losses), ("step",)

    return change


def data(inputs: Callable[[torch.Tensor], Any], targets: Callable[[torch.Tensor], Any] = lambda t: t) -> Change:
    """Wrong data."""

    def change(case: Case, draw: Draw, width: int) -> None:
        case.batches, case.ways = [(inputs(x), targets(y)) for x, y in case.batches], ("step",)

    return change


def reduction(*values: Any) -> Change:
    """A wrong reduction."""

    def change(case: Case, draw: Draw, width: int) -> None:
        case.reduction, case.ways = draw.choice(values), ("step",)

    return change


def ignored(case: Case, draw: Draw, width: int) -> None:
    """Every label is ignored."""
    loss(F.cross_entropy, nn.CrossEntropyLoss())(case, draw, width)
    case.batches = [(x, y[:, 0].long() * 0 - 100) for x, y in case.batches]


def twice(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t])


class Two(nn.Module):
    """A layer of two arguments."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class PopsUnknown:
    """A loss that pops what nobody stashes."""

    pop = ("zz",)

    def __call__(self, output: torch.Tensor, target: torch.Tensor, zz: torch.Tensor) -> torch.Tensor:
        return zz.sum()


def broken_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise ValueError("these targets must be given otherwise")


CONSTRUCTION: tuple[Misuse, ...] = (
    ((r"chunks", r"micro_batches"), option("chunks", 4)),
    ((r"balance", r"variance|partitions"), option("balance", [1, 2, 1], "equal")),
    ((r"checkpoint", r"remat"), option("checkpoint", "always")),
    ((r"partitions", r"\d"), option("partitions", 0, -1, 50, [1, 1], [9, 9], [4, 0], 2.5, "2")),
    ((r"micro_batches", r"\d"), option("micro_batches", 0, -3, 2.5, "4", None)),
    ((r"remat", r"always|never"), option("remat", "sometimes", True, 3)),
    ((r"remat", r"9"), option("remat", ["always"] * 9)),
    ((r"driver", r"threads|lockstep"), option("driver", "thread", "processes", 3)),
    ((r"schedule", r"gpipe"), option("schedule", "gpip", "fill", 7)),
    ((r"intra_op_threads",), option("intra_op_threads", 0, -1, "2")),
    ((r"seed",), option("seed", "zero", 1.5)),
    ((r"balance", r"minmax|variance"), option("balance", "max", "var")),
    ((r"costs",), option("costs", [1.0], [1.0] * 99, "speed", [-1.0, 1, 1, 1])),
    ((r"ties|0\.wieght|name",), option("ties", [("0.wieght", "2.weight")], [("0.weight",)])),
    ((r"sample",), option("costs", "flops")),
)

LAYERS: tuple[Misuse, ...] = (
    ((r"relu", r"nn\.ReLU\(\)|nn\.Module|module"), layer(lambda w: torch.relu, lambda w: F.relu)),
    ((r"Linear|in_features", r"Linear\(|arguments?|build|instance|lambda"), layer(lambda w: nn.Linear)),
    ((r"layers?", r"tensor|module"), layer(lambda w: torch.ones(3), lambda w: 3, lambda w: "x")),
    ((r"layer 2", r"leave it out|Identity"), layer(lambda w: None)),
    ((r"pipe|GPipe",), layer(lambda w: gpipe.GPipe([nn.Linear(w, w)], 1, 2))),
    ((r"layer 3", r"two arguments|2 arguments|tuple|one (argument|value|input)"), layers(
        lambda w: [Apply(lambda x: (x, x)), Two()])),
    ((r"layer 2", r"\by\b|two arguments|argument"), layer(lambda w: Two())),
    ((r"nested|Sequential|inside|within", r"stash|skip|pop"), layers(
        lambda w: [nn.Sequential(Stashes(("a",)), nn.Tanh()), Pops(("a",))])),
    ((r"\ba\b", r"pop|stash"), layers(lambda w: [Pops(("a",))])),
    ((r"\ba\b", r"stash"), layers(lambda w: [Stashes(("a",)), Stashes(("a",)), Pops(("a",))])),
    ((r"\ba\b", r"stash|pop"), layers(lambda w: [Pops(("a",)), Stashes(("a",))])),
    ((r"\ba\b", r"stash"), layers(lambda w: [Stashes(("a",)), nn.Tanh()])),
)  # fmt: skip

CALLS: tuple[Misuse, ...] = (
    ((r"numpy", r"from_numpy|as_tensor|tensor"), data(lambda x: x.numpy())),
    ((r"numpy", r"from_numpy|as_tensor|tensor"), data(lambda x: x, lambda y: y.numpy())),
    ((r"rows?",), data(lambda x: x, twice)),
    ((r"rows?",), data(twice)),
    ((r"rows?|empty",), data(lambda x: x[:0], lambda y: y[:0])),
    ((r"rows?|Whole",), data(lambda x: (x, twice(x)))),
    ((r"tensor",), data(lambda x: None)),
    ((r"tensor|dim|rows?",), data(lambda x: torch.tensor(1.0))),
    ((r"sparse", r"dense"), data(lambda x: x.to_sparse())),
    ((r"nested", r"pad|dense|jagged"), data(lambda x: torch.nested.nested_tensor(list(x)))),
    ((r"MSELoss", r"MSELoss\(\)|instance|class"), loss(nn.MSELoss)),
    ((r"CrossEntropyLoss", r"CrossEntropyLoss\(\)|instance|class"), loss(nn.CrossEntropyLoss)),
    ((r"loss", r"\.mean\(\)"), loss(lambda o, t: (o - t) ** 2, nn.MSELoss(reduction="none"))),
    ((r"loss", r"tensor"), loss(lambda o, t: 3.0, lambda o, t: None, lambda o, t: F.mse_loss(o, t).item())),
    ((r"loss", r"float|integer|dtype|long|int64|grad"), loss(lambda o, t: torch.tensor(3))),
    ((r"loss", r"grad|graph|detach"), loss(lambda o, t: F.mse_loss(o, t).detach(), lambda o, t: t.mean())),
    ((r"loss",), loss("mse", 3, None)),
    ((r"loss", r"argument"), loss(lambda o: o.mean())),
    ((r"\bzz\b", r"stash|loss|sum|metric"), loss(PopsUnknown())),
    ((r"weights?|ignore|-100|label", r"\b(0|zero|all|no|every)\b"), ignored),
    ((r"reduction", r"mean"), reduction("average", "max", 3)),
    ((r"weight|reduction", r"0|zero"), reduction(lambda t: 0.0, lambda t: torch.zeros(()))),
    ((r"weight|reduction", r"negative|-1|below|finite|nan"), reduction(lambda t: -1.0, lambda t: float("nan"))),
)  # fmt: skip


def misused(draw: Draw, choices: tuple[Misuse, ...]) -> Case:
    """A sound network with one mistake."""
    width = draw.choice((4, 7))
    words, change = draw.choice(choices)
    case = Case(
        [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, width)],
        [(torch.randn(draw.rows + 1, width), torch.randn(draw.rows + 1, width)) for _ in range(2)],
        refusal=words,
        must_refuse=True,
        remedy=False,
    )
    change(case, draw, width)
    return case


@kind("errors")
def wrong_arguments(draw: Draw) -> Case:
    """Construction."""
    return misused(draw, CONSTRUCTION)


@kind("errors")
def wrong_layers(draw: Draw) -> Case:
    """Layers that are none, or do not fit one another."""
    return misused(draw, LAYERS)


@kind("errors")
def wrong_calls(draw: Draw) -> Case:
    """Data, losses and reductions."""
    return misused(draw, CALLS)


@kind("errors")
def error_in_loss(draw: Draw) -> Case:
    """The user's own error in the loss: named as the loss's, of its own type and text, not the recompute's."""
    case = misused(draw, ((("these targets", r"loss"), loss(broken_loss)),))
    case.refusal = (r"\AValueError: these targets", r"loss", r"\A(?![\s\S]*in the recompute)")
    return case


@kind("errors")
def error_in_layer(draw: Draw) -> Case:
    """The user's own error in a layer: its type and text, with the layer, the micro-batch and the phase."""
    phase = draw.choice(("forward", "backward"))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if phase == "forward":
                raise ValueError("this layer must be given less")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("this layer must be given less")

    place = draw.randint(1, 3)
    case = misused(draw, (((), lambda case, draw, width: None),))
    case.layers = [*case.layers[:place], Apply(Fails.apply), *case.layers[place:]]
    named = rf"layer {place}" if phase == "forward" else "stage|layer"
    case.refusal = (r"\AValueError: this layer", named, r"micro-batch 0", phase)
    return case


@kind("errors")
def shape_error(draw: Draw) -> Case:
    """Two layers that do not fit: torch's own error, with the layer that it happened in."""
    case = misused(draw, (((), lambda case, draw, width: None),))
    place = draw.randint(1, 3)
    case.layers = [*case.layers[:place], nn.Linear(99, 3), *case.layers[place:]]
    case.refusal = (r"mat1|size", rf"layer {place}\b", r"forward")
    return case


@kind()
def callables_as_layers(draw: Draw) -> Case:
    """Layers given as callables, and classes that need no arguments; the weights do not depend on K."""
    width, source = draw.choice((4, 7)), torch.randn(50, 7)

    def linear() -> nn.Module:
        made = nn.Linear(width, width)
        with torch.no_grad():
            made.weight.copy_(source[:width, :width])
            made.bias.copy_(source[49, :width])
        return made

    built = [linear, nn.Tanh, linear, nn.Identity, lambda: nn.Dropout(0.2), linear]
    batches = [(torch.randn(draw.rows, width), torch.randn(draw.rows, width)) for _ in range(draw.steps)]
    return Case(built, batches, plain=[make() for make in built])
