"""S6: what holds the tensors between layers."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..blocks import Apply, network
from ..case import Case, Draw, kind

T = torch.Tensor


class AttrDict(dict[str, Any]):
    """A dict whose items are attributes."""

    __getattr__ = dict.__getitem__


class ListOf(list[Any]):
    """A subclass of list."""


class TupleOf(tuple[Any, ...]):
    """A subclass of tuple."""

    __slots__ = ()


class Slots:
    """Holds its tensors in slots."""

    __slots__ = ("h", "rest")

    def __init__(self, h: T, rest: T) -> None:
        self.h, self.rest = h, rest


class Plain:
    """Any object."""

    def __init__(self, h: T, rest: T) -> None:
        self.h, self.rest = h, rest


class Deep:
    """Holds its tensors two levels down."""

    def __init__(self, h: T, rest: T) -> None:
        self.inner = Plain(h, rest)
        self.more = {"list": [Plain(rest, h)]}


class Named(NamedTuple):
    """A named tuple."""

    h: T
    rest: T


@dataclasses.dataclass
class Data:
    """A dataclass."""

    h: T
    rest: T


@dataclasses.dataclass(frozen=True)
class FrozenData:
    """One that cannot be changed."""

    h: T
    rest: T | None = None


class Lazy:
    """Gives its tensors only when iterated."""

    def __init__(self, *tensors: T) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[T]:
        return iter(self.tensors)


class Subclass(torch.Tensor):
    """A subclass of Tensor."""


Way = tuple[str, Callable[[T, T], Any], Callable[[Any], Any]]

# What pytree knows, or Python holds to be data: these must be carried.
KNOWN: tuple[Way, ...] = (
    ("tuple", lambda h, r: (h, r), lambda v: v[0] + v[1]),
    ("list", lambda h, r: [h, [r]], lambda v: v[0] + v[1][0]),
    ("dict", lambda h, r: {"h": h, "r": {"deep": r}}, lambda v: v["h"] + v["r"]["deep"]),
    ("OrderedDict", lambda h, r: OrderedDict(h=h, r=r), lambda v: v["h"] + v["r"]),
    ("namedtuple", Named, lambda v: v.h + v.rest),
    ("defaultdict", lambda h, r: defaultdict(list, h=[h], r=[r]), lambda v: v["h"][0] + v["r"][0]),
    ("deque", lambda h, r: deque([h, r]), lambda v: v[0] + v[1]),
    ("None within", lambda h, r: (h, None, {"x": None, "r": r}), lambda v: v[0] + v[2]["r"]),
    ("empty within", lambda h, r: ((), [], {}, h, r), lambda v: v[3] + v[4]),
    ("numbers within", lambda h, r: (h, 3, "text", 2.5, True, r), lambda v: v[0] * v[1] + v[5] * v[3]),
    ("torch.Size", lambda h, r: (h, h.shape, h.dtype, r), lambda v: v[0].view(v[1]).to(v[2]) + v[3]),
    ("enum", lambda h, r: (h, enum.Enum("Colour", "RED"), r), lambda v: v[0] + v[2]),
    ("same twice", lambda h, r: (h, h, r), lambda v: v[0] * v[1] + v[2]),
    ("device", lambda h, r: {"h": h, "device": h.device, 3: r}, lambda v: v["h"].to(v["device"]) + v[3]),
)

# What it does not: carried, or refused by the name of the layer and of the type.
UNKNOWN: tuple[Way, ...] = (
    ("AttrDict", lambda h, r: AttrDict(h=h, rest=r), lambda v: v.h + v.rest),
    ("ListOf", lambda h, r: ListOf([h, r]), lambda v: v[0] + v[1]),
    ("TupleOf", lambda h, r: TupleOf((h, r)), lambda v: v[0] + v[1]),
    ("Slots", Slots, lambda v: v.h + v.rest),
    ("Plain", Plain, lambda v: v.h + v.rest),
    ("Deep", Deep, lambda v: v.inner.h + v.more["list"][0].h),
    ("Data", Data, lambda v: v.h + v.rest),
    ("FrozenData", FrozenData, lambda v: v.h + v.rest),
    ("Lazy", Lazy, lambda v: sum(v)),
    ("set", lambda h, r: {h, r}, lambda v: sum(sorted(v, key=lambda t: t.detach().sum().item()))),
    (
        "frozenset",
        lambda h, r: (frozenset([h, r]),),
        lambda v: sum(sorted(v[0], key=lambda t: t.detach().sum().item())),
    ),
    ("function", lambda h, r: (h, lambda: r), lambda v: v[0] + v[1]()),
    ("function", lambda h, r: lambda: h * r, lambda v: v()),
    ("iterator", lambda h, r: iter([h, r]), lambda v: sum(v)),
    ("generator", lambda h, r: (t for t in (h, r)), lambda v: sum(v)),
    ("SimpleNamespace", lambda h, r: types.SimpleNamespace(h=h, rest=r), lambda v: v.h + v.rest),
    ("mappingproxy", lambda h, r: types.MappingProxyType({"h": h, "r": r}), lambda v: v["h"] + v["r"]),
    ("UserDict", lambda h, r: collections.UserDict(h=h, r=r), lambda v: v["h"] + v["r"]),
    ("ChainMap", lambda h, r: collections.ChainMap({"h": h}, {"r": r}), lambda v: v["h"] + v["r"]),
    ("partial|function|lambda", lambda h, r: [Apply(lambda x: x * h), r], lambda v: v[0](v[1])),
    ("values", lambda h, r: {"h": h, "r": r}.values(), lambda v: sum(v)),
    ("Plain|dict", lambda h, r: {"x": [Plain(h, r)]}, lambda v: v["x"][0].h * v["x"][0].rest),
)


class Make(nn.Module):
    """Puts two tensors into a container."""

    def __init__(self, width: int, put: Callable[[T, T], Any]) -> None:
        super().__init__()
        self.linear, self.put = nn.Linear(width, width), put

    def forward(self, x: T) -> Any:
        h = self.linear(x)
        return self.put(h, h.tanh() * 2)


class Take(nn.Module):
    """Takes them out."""

    def __init__(self, take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.take = take

    def forward(self, value: Any) -> T:
        out: T = self.take(value)
        return out


def between(draw: Draw, way: Way, **further: Any) -> Case:
    width = draw.width()
    passing: list[nn.Module] = [nn.Identity() for _ in range(draw.randint(0, 2))]
    core = [Make(width, way[1]), *passing, Take(way[2]), nn.Linear(width, width)]
    return network(draw, width, core, before=draw.randint(0, 1), **further)


@kind("S6")
def s6_unknown_containers(draw: Draw) -> Case:
    """Containers that pytree does not know: carried, or refused by layer and type."""
    way = draw.choice(UNKNOWN)
    names = {"generator": "generator|iterator", "function": "function|lambda|callable|closure|method"}
    return between(draw, way, refusal=(r"layer \d", names.get(way[0], f"{way[0]}|Apply")))


@kind()
def known_containers(draw: Draw) -> Case:
    return between(draw, draw.choice(KNOWN))


def inner_tensor(value: Any) -> T:
    """The first tensor that an output holds."""
    if isinstance(value, torch.Tensor):
        return value
    for name in ("h", "logits"):
        if hasattr(value, name):
            return inner_tensor(getattr(value, name))
    return inner_tensor(value["h"] if hasattr(value, "keys") else next(iter(value)))


@kind("S6")
def s6_output_container(draw: Draw) -> Case:
    """The last layer's output is held by something: by a step and by a call."""
    width = draw.width()
    name, put, _ = draw.choice([way for way in (*KNOWN, *UNKNOWN) if way[0] in OUTPUTS])
    case = network(draw, width, nn.Tanh())
    case.layers = [*case.layers, Make(width, put)]
    case.loss = lambda output, target: (inner_tensor(output) - target).pow(2).mean()
    if draw.maybe():
        draw.micro_batches = 1
    if name not in ("tuple", "dict", "OrderedDict", "namedtuple"):
        case.ways = ("step",) if name in ("Slots", "Plain", "Data", "FrozenData", "Deep") else case.ways
        case.refusal = (r"layer \d|output", f"{name}")
    return case


OUTPUTS = ("tuple", "dict", "OrderedDict", "namedtuple", "AttrDict", "ListOf", "Slots", "Plain", "Data", "FrozenData")


@kind("S6")
def s6_tensor_subclass(draw: Draw) -> Case:
    """A subclass of Tensor, a parameter or a buffer itself is what crosses."""
    width = draw.width()
    ways: tuple[Way, ...] = (
        ("Subclass", lambda h, r: h.as_subclass(Subclass), lambda v: v.as_subclass(torch.Tensor) * 2),
        ("Subclass", lambda h, r: (h, r.as_subclass(Subclass)), lambda v: v[0] + v[1].as_subclass(torch.Tensor)),
        (
            "Subclass",
            lambda h, r: h.as_subclass(Subclass),
            lambda v: (v * type(v).__name__.count("S")).as_subclass(T),
        ),
    )
    way = draw.choice(ways)
    core = [Make(width, way[1]), Take(way[2])]
    return network(draw, width, core, refusal=(r"layer \d", way[0]))


class HandsParameter(nn.Module):
    """Gives its own weight, or a buffer, along with its output."""

    table: torch.Tensor

    def __init__(self, width: int, which: int) -> None:
        super().__init__()
        self.linear, self.which = nn.Linear(width, width), which
        self.register_buffer("table", torch.randn(width))

    def forward(self, x: T) -> tuple[T, T]:
        weight = self.linear.weight
        return self.linear(x), (weight, self.table, weight.t(), weight * 2)[self.which]


@kind()
def parameter_crosses(draw: Draw) -> Case:
    """A parameter or a buffer crosses the boundary itself."""
    width = draw.width()
    core = [HandsParameter(width, draw.randint(0, 3)), Apply(lambda pair: pair[0] * pair[1].sum(0))]
    return network(
        draw, width, core, before=draw.randint(0, 1), oracle="shared", refusal=(r"layer \d", "parameter|weight")
    )
