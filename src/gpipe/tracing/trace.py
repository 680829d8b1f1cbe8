"""The path that a model's forward takes: its events, which layer does which, and what crosses between layers.

An event is a call of a unit, or an operation between units on what depends on parameters, on values of the inputs
that are no whole numbers, or on chance. Whatever else the forward does - masks, positions, rotary tables - is done
by every layer for itself.

    forward      embed  mask  block  block  add  norm  head  loss
    event          0      -     1      2     3    4     5    6..9
    layer          0     all    1      2    -------- 3 ---------

Note "Relay". A value that several later layers use goes from the layer that made it to the first of these, from there
to the next, and its gradient comes back the same way: so the gradients of its uses are added one after another, from
the last use to the first, as autograd adds them where nothing is cut.

One call that a model's forward makes.

What events returned, as far as later layers must know it: layouts of tensors, and plain values.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Never, TypeAlias

import torch
from torch import Tensor, nn

from gpipe._torch.trees import tree_map_only
from gpipe.stages.skips import Pop
from gpipe.tracing.placeholder import Absent, CannotSplitError
from gpipe.tracing.structure import Again, Structure


class Tag(NamedTuple):
    """Names a tensor in every replay: the event that made it, and its place among what that returned.

    Inputs are what event -1 made.
    """

    event: int
    leaf: int

    def __str__(self) -> str:
        return f"{self.event}.{self.leaf}"


def is_carried(leaf: object) -> bool:
    """Whether an input is carried only to those layers that use it: all but whole numbers, which every layer has."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


@dataclass(frozen=True)
class Event:
    """One event of a forward.

    Attributes:
        name: The unit's, or the function's.
        is_unit: Which of the two.
        uses: What it was given of what others made.
        raw: The names of the parameters that it was given as they are.
        returns: How what it returned is put together.
        again: The leaves that are the same tensor as one before them, each with that.
        inner: The other units that a unit called, or whose parameters it used.
    """

    name: str
    is_unit: bool
    uses: frozenset[Tag]
    raw: tuple[str, ...]
    returns: Structure
    again: Again = ()
    inner: tuple[str, ...] = ()


class Hop(NamedTuple):
    """The way of a tensor from a layer that has it to the next that uses it (note "Relay")."""

    tag: Tag
    source: int
    target: int

    @property
    def pop(self) -> Pop:
        """The same as the use of a stash."""
        return Pop(f"{self.tag}.{self.source}", self.source, self.target)


Bounds: TypeAlias = Sequence[int]


@dataclass(frozen=True)
class Path:
    """What the forward did with inputs of one structure.

    Attributes:
        inputs: How the inputs are put together.
        carried: Those inputs that go to the layers that use them; all others go to every layer.
        events: All, in order.
        starts: The first event of each layer.
        results: The tensors of the output that events or inputs brought.
        output: How the output is put together.
        buffers: The buffers that are read between units.
        taken: The leaves of the inputs that any operation was given.
        layouts: The shape and type of every tensor that events or inputs brought.
    """

    inputs: Structure
    carried: tuple[Tag, ...]
    events: tuple[Event, ...]
    starts: tuple[int, ...]
    results: frozenset[Tag]
    output: Structure
    buffers: frozenset[str]
    taken: frozenset[int]
    layouts: Mapping[Tag, tuple[tuple[int, ...], torch.dtype]]

    def layer_of(self, event: int) -> int:
        """The layer that does an event; the inputs are with the first."""
        return max(bisect_right(self.starts, event) - 1, 0)

    def events_of(self, first: int, last: int) -> tuple[int, int]:
        """The first event of a layer, and the first one behind another."""
        return self.starts[first], self.starts[last + 1] if last + 1 < len(self.starts) else len(self.events)

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The ways of all tensors that cross from layer to layer."""
        users: dict[Tag, set[int]] = {}
        for at, event in enumerate(self.events):
            for tag in event.uses:
                users.setdefault(tag, set()).add(self.layer_of(at))
        for tag in self.results:
            users.setdefault(tag, set()).add(len(self.starts) - 1)
        found = []
        for tag, layers in sorted(users.items()):
            here = self.layer_of(tag.event)
            for layer in sorted(layers):
                if layer > here:
                    found.append(Hop(tag, here, layer))
                    here = layer
        return tuple(found)

    def live_before(self, layer: int) -> list[Tag]:
        """What crosses a cut before a layer."""
        return [hop.tag for hop in self.hops if hop.source < layer <= hop.target]


PLAIN = frozenset({int, float, bool, str, type(None)})
"""What most arguments are that hold no tensor."""


class Call(NamedTuple):
    """A call of a unit, or of a function of torch between units.

    Attributes:
        name: The unit's, or the function's.
        func: The unit, or the function.
        args: What it is given.
        kwargs: And by name.
        tensors: The tensors among these, also in containers.
    """

    name: str
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Call":
        """The call, with its tensors found."""
        tensors: list[Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(kwargs.values(), tensors)
        return cls(name, func, args, kwargs, tensors)

    @property
    def unit(self) -> nn.Module | None:
        """The unit that is called; None for a function."""
        return self.func if isinstance(self.func, nn.Module) else None

    def do(self) -> Any:
        """What it returns."""
        return self.func(*self.args, **self.kwargs)

    def given(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """The same with other tensors."""
        args, kwargs = tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return Call.of(self.name, self.func, args, kwargs)


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if type(value) in PLAIN:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif is_dataclass(value) and not isinstance(value, type):
            _collect((getattr(value, field.name) for field in fields(value)), found)


PLAIN_KINDS = (bool, int, float, str, type(None))
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
OPAQUE = (
    "between blocks {name} is asked of a value that an earlier layer made and that cannot cross the cuts: it is "
    "neither a tensor nor a plain number or text (an array of numpy, an object of a class). Compute it by torch, "
    "or in a block"
)
_OPAQUE: list[Any] = []


class Unknown:
    """Stands for a value of a kind that does not cross cuts: whoever looks into it is refused."""

    def __getattr__(self, name: str) -> Never:
        """Refuses."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotSplitError(OPAQUE.format(name=name))


def describe(leaves: Sequence[Any]) -> list[Any]:
    """What is written down of what an event returned.

    >>> describe([torch.ones(2, 3), 7, object()])
    [['torch.float32', [2, 3], False], [7], []]
    """
    return [
        [str(leaf.dtype), list(leaf.shape), leaf.requires_grad]
        if isinstance(leaf, Tensor)
        else ([leaf] if isinstance(leaf, PLAIN_KINDS) else _OPAQUE)
        for leaf in leaves
    ]


def stand_in(described: Sequence[Any], tag: Tag, device: torch.device) -> Any:
    """What stands for a leaf that did not cross: a plain value itself."""
    match described:
        case [dtype, shape, wants_gradient]:
            return _absent(tag, dtype, tuple(shape), device, wants_gradient)
        case [value]:
            return value
    return Unknown()


@lru_cache(maxsize=1024)  # each micro-batch asks for the same; one for each tag, since walks tell tensors apart
def _absent(tag: Tag, dtype: str, shape: tuple[int, ...], device: torch.device, wants_gradient: bool) -> Absent:
    return Absent.like(shape, DTYPES[dtype], device, wants_gradient=wants_gradient)


def written(log: Sequence[Sequence[Any]]) -> str:
    """The log as text."""
    return json.dumps(log, separators=(",", ":"))


def read(text: str) -> list[list[Any]]:
    """The log of a text."""
    found: list[list[Any]] = json.loads(text)
    return found
