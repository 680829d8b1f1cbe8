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
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gpipe._torch.trees import tree_map_only
from gpipe.stages.skips import Pop
from gpipe.tracing.values import Again, Structure, Tag


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
