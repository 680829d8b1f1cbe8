"""The trace that a model's forward takes: its operations, which layer does which, and what crosses between layers.

An operation is a call of a unit, or of a function of torch between units on what depends on
parameters, on values of the inputs that are no whole numbers, or on chance. Whatever else the forward does - masks,
positions, rotary tables - is done by every layer for itself.

    forward      embed  mask  block  block  add  norm  head  loss
    operation      0      -     1      2     3    4     5    6..9
    layer          0     all    1      2    -------- 3 ---------

Note "Relay". A value that several later layers use goes from the layer that made it to the first of these, from there
to the next, and its gradient comes back the same way: so the gradients of its uses are added one after another, from
the last use to the first, as autograd adds them where nothing is cut.

Note "Collections". A forward may open lists, in a context variable that it sets, to which hooks in units add: so
transformers collects hidden states, attentions and what routers give. What a unit adds counts to what it returns, and
where it ran in a layer before, it is added again to the lists that the forward has there.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe._torch.trees import OpenDataclass, TreeSpec, map_tensors, tree_flatten, tree_map, tree_unflatten
from gpipe.stages.skips import Pop


class CannotSplitError(ValueError):
    """A model's forward does what cannot be computed in parts to the same bits; says what, where, and what to do."""

    def __init__(self, text: str, places: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.places = tuple(places)  # modules that may be a block each instead


class ValueId(NamedTuple):
    """Names a tensor in each interpretation: the operation that made it, and its place among what that returned."""

    op: int  # -1 made the inputs
    leaf: int

    def __str__(self) -> str:
        return f"{self.op}.{self.leaf}"


Leaves = list[Any]
Again = Mapping[int, ValueId]  # the leaves that are the same tensors as others before them, each with what these are


@dataclass(frozen=True)
class Structure:
    """What holds the leaves of a value."""

    spec: TreeSpec

    def filled(self, leaves: Sequence[Any]) -> Any:
        return tree_unflatten(leaves, self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle is made of a value of this structure: of torch's own specs it would warn."""
        return _structure_of, (self.filled(range(self.spec.num_leaves)),)


def _structure_of(value: Any) -> Structure:
    return take_apart(value)[1]


ONE = Structure(tree_flatten(0)[1])  # of a value that is one leaf


def take_apart(value: Any) -> tuple[Leaves, Structure]:
    """The leaves of a value, also of dataclasses in it, and its structure.

    >>> @dataclass
    ... class Made: one: int; more: list
    >>> leaves, structure = take_apart((Made(1, [2, 3]), 4))
    >>> leaves, structure.filled([5, 6, 7, 8])
    ([1, 2, 3, 4], (Made(one=5, more=[6, 7]), 8))
    """
    if isinstance(value, Tensor):
        return [value], ONE
    leaves, spec = tree_flatten(value)
    if any(map(_is_dataclass, leaves)):
        leaves, spec = tree_flatten(tree_map(_opened, value))
    return leaves, Structure(spec)


def _is_dataclass(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _opened(leaf: Any) -> Any:
    """A dataclass opened, and those in it, for torch's trees to look into."""
    if not _is_dataclass(leaf):
        return leaf
    inside = {field.name: tree_map(_opened, getattr(leaf, field.name)) for field in fields(leaf)}
    return OpenDataclass(type(leaf), inside)


def is_carried(leaf: object) -> bool:
    """Whether an input is carried only to those layers that use it: all but whole numbers, which every layer has."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


@dataclass(frozen=True)
class Op:
    """One operation of a forward."""

    name: str  # the unit's, or the function's
    is_unit: bool
    uses: frozenset[ValueId]  # what it was given of what others made
    raw: tuple[str, ...]  # the parameters that it was given as they are
    returns: Structure  # how what it returned is put together
    again: Again  # the leaves of that which are known by other value ids
    inner: tuple[str, ...]  # the other units that a unit called, or whose parameters it used


class Edge(NamedTuple):
    """The way of a tensor from a layer that has it to the next that uses it (note "Relay")."""

    value_id: ValueId
    source: int
    target: int

    @property
    def pop(self) -> Pop:
        return Pop(f"{self.value_id}.{self.source}", self.source, self.target)


@dataclass(frozen=True)
class Trace:
    """What the forward did with inputs of one structure."""

    inputs: Structure  # how they are put together
    carried: tuple[ValueId, ...]  # those inputs that go to the layers that use them; all others go to every layer
    ops: tuple[Op, ...]  # in order
    starts: tuple[int, ...]  # the first operation of each layer
    results: frozenset[ValueId]  # the tensors of the output that operations or inputs brought
    output: Structure  # how it is put together
    buffers: frozenset[str]  # those that are read between units
    taken: frozenset[int]  # the leaves of the inputs that any function between units was given
    layouts: Mapping[ValueId, tuple[tuple[int, ...], torch.dtype]]  # of all that operations or inputs brought

    def layer_of(self, op: int) -> int:
        """The layer that does an operation; the inputs are with the first."""
        return max(bisect_right(self.starts, op) - 1, 0)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        users: dict[ValueId, set[int]] = {value_id: {len(self.starts) - 1} for value_id in self.results}
        for at, op in enumerate(self.ops):
            for value_id in op.uses:
                users.setdefault(value_id, set()).add(self.layer_of(at))
        found = []
        for value_id, layers in sorted(users.items()):
            here = self.layer_of(value_id.op)
            for layer in sorted(layers):
                if layer > here:
                    found.append(Edge(value_id, here, layer))
                    here = layer
        return tuple(found)

    @cached_property
    def inside(self) -> frozenset[int]:
        """The functions of which nothing crosses a cut: those that give tuples of tensors may give other numbers."""
        crosses = {edge.value_id.op for edge in self.edges}
        return frozenset(at for at, op in enumerate(self.ops) if not op.is_unit and at not in crosses)

    def live_before(self, layer: int) -> list[ValueId]:
        """What crosses a cut before a layer."""
        return [edge.value_id for edge in self.edges if edge.source < layer <= edge.target]


class Collected(NamedTuple):
    """What a unit returned, and what it has put beside that into each of the lists that were open."""

    returned: Any
    more: list[list[Any]]


def open_lists(outside: Context) -> list[list[Any]]:
    """The lists, alone or in a dict, in the context variables that were set since; code in units may add to them."""
    now = copy_context()
    held = [value for variable, value in now.items() if value is not outside.get(variable)] if len(now) else ()
    inner = (value.values() if isinstance(value, dict) else [value] for value in held)
    return [one for values in inner for one in values if isinstance(one, list)]


class OpCall(NamedTuple):
    """A call of a unit, or of a function of torch between units."""

    name: str
    func: Callable[..., Any]  # the unit, or the function
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]  # among these, also in containers
    lists: Sequence[list[Any]] = ()  # those to which a unit may add

    @classmethod
    def of(
        cls,
        name: str,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        lists: Sequence[list[Any]] = (),
    ) -> "OpCall":
        tensors: list[Tensor] = []
        _collect(args, tensors)
        _collect(kwargs.values(), tensors)
        return cls(name, func, args, kwargs, tensors, lists)

    @property
    def unit(self) -> nn.Module | None:
        """The unit that is called; None for a function."""
        return self.func if isinstance(self.func, nn.Module) else None

    def do(self) -> Any:
        """What it returns; where lists are open, with what it added to them, which is taken out."""
        if not self.lists:
            return self.func(*self.args, **self.kwargs)
        before = list(map(len, self.lists))
        try:
            returned = self.func(*self.args, **self.kwargs)
            return Collected(returned, [one[at:] for one, at in zip(self.lists, before, strict=True)])
        finally:
            for one, at in zip(self.lists, before, strict=True):
                del one[at:]

    def given(self, change: Callable[[Tensor], Tensor]) -> "OpCall":
        args, kwargs = map_tensors((self.args, dict(self.kwargs)), change)
        return OpCall.of(self.name, self.func, args, kwargs, self.lists)


PLAIN = frozenset({bool, int, float, str, type(None)})


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
        elif _is_dataclass(value):
            _collect((getattr(value, field.name) for field in fields(value)), found)
