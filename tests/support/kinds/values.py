"""What layers hand on to the next: containers, dtypes, views, attributes, objects; and what cannot cross a cut."""

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .blocks import Apply, mini_batches, network
from .case import Case, Draw, kind

WIDTH = 6
VALUES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a tuple": lambda y, x: (y, x * 2),
    "nested": lambda y, x: {"a": [y, (y * 2, None)], "b": {}, "c": (), "d": {"e": y.sin()}},
    "keys of any kind": lambda y, x: {3: y, None: x, True: y * 2, "": 1.5},
    "no tensors beside it": lambda y, x: (y, 3, -(2**70), True, None, 2.5, float("inf"), "é", 1j, b"\0x", torch.int8),
    "whole numbers": lambda y, x: (y, x > 0, (x * 9).long(), (x * 9).int(), (x * 9).to(torch.int8), x.byte()),
    "half": lambda y, x: (y.half(), x.half()),
    "bfloat16": lambda y, x: (y.bfloat16(), x.bfloat16()),
    "double": lambda y, x: (y.double(), x.double()),
    "complex": lambda y, x: (torch.complex(y, y * 2), torch.complex(x, x).to(torch.complex128)),
    "conjugate": lambda y, x: (torch.complex(y, y * 2).conj(), torch.complex(y, x).conj().imag),
    "empty": lambda y, x: (y, y[:0], torch.empty(0, 3), x[:, :0]),
    "no dimensions": lambda y, x: (y, y.sum(), torch.tensor(3)),
    "transposed": lambda y, x: (y.t(), x.t(), y.t().contiguous().t()),
    "permuted": lambda y, x: y.view(-1, 1, 2, 3).permute(3, 0, 2, 1),
    "channels last": lambda y, x: y.view(-1, 2, 3, 1).contiguous(memory_format=torch.channels_last),
    "slices": lambda y, x: (y[:, ::2], x[::2], y[:, 1:4], y[1:]),
    "expanded": lambda y, x: (y[:, :1].expand(-1, 5), x[:1].expand(4, -1), y.sum().expand(2, 3)),
    "one tensor twice": lambda y, x: (y, y, x, [x, y]),
    "views of one": lambda y, x: y.chunk(2, 1),
    "a view and its base": lambda y, x: (y, y[:, :2]),
    "no gradient": lambda y, x: (y.detach() * 2, x, y),
    "a leaf of its own": lambda y, x: (y, torch.ones(2, 3, requires_grad=True)),
    "large": lambda y, x: (y.repeat(1, 4000), x.repeat(1, 4000).t()),
    "large and small": lambda y, x: [y.repeat(1, 3000), y[:, :1], x > 0, y.repeat(1, 1500).t()],
}


class Makes(nn.Module):
    """Hands on a value of some kind; tells `look` of it."""

    def __init__(self, name: str, look: Callable[[object], None] = lambda value: None) -> None:
        super().__init__()
        self.value, self.look = VALUES[name], look
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> object:
        value = self.value(self.linear(x), x.detach())
        self.look(value)
        return value


class Uses(nn.Module):
    """Makes one row of all tensors of a micro-batch; tells `look` of what it is given."""

    def __init__(self, look: Callable[[object], None] = lambda value: None) -> None:
        super().__init__()
        self.look = look
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, value: object) -> Tensor:
        self.look(value)
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel()]
        parts = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
        total = torch.stack([part.double().tanh().mean() * (at + 1) for at, part in enumerate(parts)]).sum()
        return total.float() * self.weight.unsqueeze(0)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.mean(0, keepdim=True)).square().sum()


@kind()
def any_value(draw: Draw) -> Case:
    """A value crosses one cut, or two; a call cannot put rows together of which each is of a micro-batch."""
    passing = [Apply(lambda value: value) for _ in range(draw.randint(0, 1))]
    layers = [Makes(draw.choice(list(VALUES))), *passing, Uses()]
    together = ("outputs-cannot-be-joined", "Return the rows of the micro-batch in the first dimension")
    return Case(layers, mini_batches(draw, WIDTH), loss=loss_of, cut=(1,) * len(layers), refusal=together)


class Pair(NamedTuple):
    main: Tensor
    side: Tensor


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH**2).reshape(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.weight


def replace_x(values: Any) -> Any:
    values["x"] = values["x"].exp() + len(values["n"])
    values["n"].append(None)
    return values


def narrow(x: Tensor) -> Tensor:
    return x.sum(1) * 0.3 + x.transpose(1, 2).cumsum(2).mean(2) + x.reshape(len(x), -1).sum(1, keepdim=True)


Steps = tuple[Callable[..., Any], ...]
BETWEEN: dict[str, Steps] = {
    "a named tuple": (lambda x: Pair(x, x.tanh()), lambda v: Pair(v.side, v.main.exp()), lambda v: v.main * v.side),
    "integers and bools": (
        lambda x: (x, x.argmax(1), x > 0), lambda v: (v[0], v[1] + 1, ~v[2]), lambda v: v[0] * v[1][:, None] * v[2]
    ),
    "complex": (lambda x: torch.complex(x, x.tanh()), lambda x: x * x.conj() * (1 + 2j), lambda x: x.abs()),
    "lazy conjugates": (lambda x: torch.fft.fft(x).conj(), lambda z: z.imag.sum(1, keepdim=True).expand(-1, WIDTH)),
    "quantized": (
        lambda x: (x, torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)), lambda v: v[0] + v[1].dequantize()
    ),
    "several dtypes": (
        lambda x: (x, x.double(), x.bfloat16()), lambda v: v[::-1], lambda v: v[2] + v[1].float() * v[0]
    ),
    "overlapping views": (
        lambda x: (x, x[:, 1:5], x[:1]), lambda v: (v[0], v[1].sum(1), v[2]), lambda v: v[0] * v[1][:, None] + v[2]
    ),
    "columns": (lambda x: x.repeat(1, 2)[:, ::2], nn.functional.gelu, lambda x: x + x.sum()),
    "transposed": (lambda x: x.t().contiguous().t(), nn.functional.silu, lambda x: x.t().cumsum(0).t()),
    "expanded": (lambda x: x.unsqueeze(1).expand(-1, 37, -1), narrow),
    "an expanded gradient": (nn.functional.silu, lambda x: (x, x.sum(1)), lambda v: v[0] * v[1][:, None]),
    "the same tensor thrice": (lambda x: [x] * 3, lambda v: v[0] * 1.1 + v[1].exp() * v[2]),
    "a view of all of it": (lambda x: (x, x.view_as(x)), lambda v: v[0] * 1.1 + v[1].exp() * v[0]),
    "what needs no gradient": (
        lambda x: (x, x.detach()), lambda v: (v[0], v[1] * 2), lambda v: (v[0] * v[1], None), lambda v: v[0]
    ),
    "a dead end": (lambda x: (x, x.exp()), lambda v: (v[0] * 2, v[1]), lambda v: v[0]),
    "dead from its start": (lambda x: (x.detach(), x), lambda v: v[0]),
    "a parameter": (Bare, lambda v: v[0] @ v[1]),
    "objects": (
        lambda x: (x, SimpleNamespace(n=3), range(4), np.ones(3)), lambda v: v[0] * v[1].n * len(v[2]) * len(v[3])
    ),
    "in place, on a view": (lambda x: x.tanh() * 1, lambda x: x[:, 2:].mul_(3).sum(1, keepdim=True) + x),
    "in place, on one of several": (
        lambda x: (x * 1, x * 2), lambda v: (v[0].add_(v[1]), v[1]), lambda v: v[0] * v[1]
    ),
    "in place, in a dict": (lambda x: {"x": x * 1}, lambda v: v | {"x": v["x"].add_(1)}, lambda v: v["x"]),
    "in place, on a dict": (lambda x: {"x": x * 1, "n": []}, replace_x, replace_x, lambda v: v.pop("x")),
    "in place, on integers": (
        lambda x: (x, x.argmax(1)), lambda v: (v[0], v[1].add_(1)), lambda v: v[0] * v[1][:, None]
    ),
    "in place, behind views": (
        lambda x: x * 1, lambda x: x.view(-1, 2, 3), lambda x: x.flatten(1).mul_(2), lambda x: x.exp()
    ),
    "in place, on columns": (
        lambda x: x.repeat(1, 2)[:, ::2], partial(nn.functional.silu, inplace=True), lambda x: x + x.sum()
    ),
}  # fmt: skip


@kind()
def values_between(draw: Draw) -> Case:
    """Functions that give each other values, in any container, of any dtype, changed in place."""
    steps = draw.choice(list(BETWEEN.values()))
    middle = [Bare() if step is Bare else Apply(step) for step in steps]
    layers = [nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, WIDTH)]
    return Case(layers, mini_batches(draw, WIDTH), cut=(1,) * len(layers) if draw.maybe() else None)


@kind()
def nothing_needs_a_gradient(draw: Draw) -> Case:
    functions = (lambda x: x * 2, lambda x: (x, x + 1), lambda v: v[0] * v[1])
    return Case([*map(Apply, functions), nn.Linear(WIDTH, WIDTH)], mini_batches(draw, WIDTH))


@kind()
def other_dtypes(draw: Draw) -> Case:
    """Layers of bfloat16 or float64, between others."""
    dtype = draw.choice((torch.bfloat16, torch.float64))
    middle = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)]
    draw.rows = max(draw.rows, 2 * draw.micro_batches)
    layers = [Apply(lambda x: x.to(dtype)), *(layer.to(dtype) for layer in middle), Apply(lambda x: x.float())]
    return Case(layers, mini_batches(draw, WIDTH))


class Attributes(dict):  # type: ignore[type-arg]  # as people write it
    __getattr__ = dict.__getitem__


class Slots:
    __slots__ = ("deep",)

    def __init__(self, tensor: Tensor) -> None:
        self.deep = [{"tensor": tensor}]


HIDING: tuple[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]], ...] = (
    (lambda h: Attributes(h=h), lambda v: v.h),
    (Slots, lambda v: v.deep[0]["tensor"]),
    (lambda h: SimpleNamespace(inner=SimpleNamespace(h=h)), lambda v: v.inner.h),
    (lambda h: {h}, lambda v: next(iter(v))),
    (lambda h: lambda: h, lambda v: v()),
    (lambda h: partial(torch.add, h), lambda v: v(1)),
    (lambda h: h.tanh, lambda v: v()),
    (lambda h: iter([h]), next),
    (lambda h: [Slots(h)], lambda v: v[0].deep[0]["tensor"]),
)


@kind("S6")
def s6_hidden_tensors(draw: Draw) -> Case:
    """Containers that torch cannot look into: right within a stage, refused at a cut."""
    hide, find = draw.choice(HIDING)
    core = [Apply(lambda x: (hide(x), x * 2)), Apply(lambda v: find(v[0]) * v[1])]
    words = (r"layer \d", "tensors-in-unregistered-class")
    return network(draw, WIDTH, core, before=1, refusal=words)


@kind("S6")
def s6_tensors_on_tensors(draw: Draw) -> Case:
    def put(x: Tensor) -> Tensor:
        out = x * 2
        out.mask = x  # type: ignore[attr-defined]
        return out

    words = (r"layer \d", "the attribute 'mask' of a tensor holds tensors")
    return network(draw, WIDTH, [Apply(put), Apply(lambda x: x * x.mask)], before=1, refusal=words)


class Prototypes(nn.Module):
    mean: Tensor

    def __init__(self, mean: Tensor | None = None, hands_on: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH) if mean is None else mean)
        self.hands_on = hands_on

    def forward(self, x: Tensor) -> Any:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x, self.mean) if self.hands_on else x


@kind()
def handed_on_and_written_again(draw: Draw) -> Case:
    """A buffer, or a workspace that is none, is handed on and changed by the next micro-batch."""
    space = torch.zeros(1)

    def work(x: Tensor) -> tuple[Tensor, Tensor]:
        space.copy_(x.detach().mean())
        return x, space

    first = draw.choice((Prototypes(hands_on=True), Apply(work)))
    words = None if isinstance(first, Prototypes) else (r"layer \d", "changed in place|in its forward|lies in|buffer")
    core = [first, Apply(lambda both: both[0] * (1 + both[1]))]
    return network(draw, WIDTH, core, before=1, refusal=words)


@kind()
def a_buffer_of_two_modules(draw: Draw) -> Case:
    """Two modules have one buffer: right in one stage, refused in two."""
    first = Prototypes()
    core = [first, nn.Linear(WIDTH, WIDTH), Prototypes(first.mean)]
    words = ("the value of its buffers for micro-batch .* differs (from the reference|if the other stages)",)
    return network(draw, WIDTH, core, refusal=words)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.zeros(2 * WIDTH))
        self.register_buffer("mean", self.get_buffer("flat")[:WIDTH])

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("mean").add_(x.detach().mean(0))
        return x * self.get_buffer("flat").sum()


@kind()
def buffers_in_one_memory(draw: Draw) -> Case:
    words = (r"Flat\.flat, Flat\.mean: a forward changes buffers that share memory",)
    return network(draw, WIDTH, Flat(), refusal=words)


class Stash(nn.Module):
    stash = ("early",)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"early": x}


class Pop(nn.Module):
    pop = ("early",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return x + self.linear(early) * early.mean(1, keepdim=True)


@kind()
def popped_thrice(draw: Draw) -> Case:
    """The gradients of several pops are added from the last to the first."""
    middle = [layer for _ in range(draw.randint(1, 3)) for layer in (Pop(), *draw.choice(([], [nn.Tanh()])))]
    return network(draw, WIDTH, [Stash(), *middle], before=1, oracle="shared")


@kind()
def stash_changed_in_place(draw: Draw) -> Case:
    """A stash is what it was when stashed; who changes it is refused."""
    core = [Stash(), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), Pop()]
    return network(draw, WIDTH, core, before=1, refusal=("stash|shares memory|in.place",), must_refuse=True)


@kind()
def begins_to_work_in_place(draw: Draw) -> Case:
    """From some forward on a layer works in place: right, or refused, never silent."""
    forwards, begins = itertools.count(), draw.randint(1, 12)

    def work(x: Tensor) -> Tensor:
        return x.relu_() if next(forwards) >= begins else x.relu()

    words = (r"in.place",)
    return network(draw, WIDTH, [nn.Linear(WIDTH, WIDTH), Apply(work)], refusal=words, late=True, remedy=False)
