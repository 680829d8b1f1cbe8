"""The trace of a model's forward: its operations, the layer of each, and the tensors that cross between layers.

An operation is a call of a unit (a module that runs as a whole), or of a function of torch between units. Such a
function is an operation if it depends on parameters, on inputs of floating point, or on random numbers. Every layer
repeats all other code of the forward, such as masks, positions and rotary tables. For example::

    forward      embed  mask  block  block  add  norm  head  loss
    operation      0      -     1      2     3    4     5    6..9
    layer          0     all    1      2    -------- 3 ---------

Note "Relay". A tensor that several later layers use is relayed. The layer that computes the tensor sends it to the
first layer that uses it, which sends it to the next such layer, and so on. The gradient returns along the same route.
The gradients of the uses are therefore summed from the last use to the first, as in the unsplit model.

Note "Collections". A forward may create lists in a context variable, to which hooks in units append (open lists).
transformers collects hidden states, attentions and router logits in such lists. The items that a unit appends are
part of the result of the unit. Later layers append these items again to the lists of their own run of the forward.
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
    """Raised if gpipe cannot split a model into stages with bitwise identical results.

    Attributes:
        places: Names of modules. If each of these modules becomes a block, the split may succeed.
    """

    def __init__(self, text: str, places: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.places = tuple(places)


class ValueId(NamedTuple):
    """Identifies a tensor: the operation that returned it, and its index among the leaves of the result."""

    op: int  # -1 for the inputs
    leaf: int

    def __str__(self) -> str:
        return f"{self.op}.{self.leaf}"


Leaves = list[Any]
Repeated = Mapping[int, ValueId]  # the leaves that are the same tensors as earlier leaves, and the ids of those


@dataclass(frozen=True)
class Structure:
    """The structure of a value without its leaves."""

    spec: TreeSpec

    def filled(self, leaves: Sequence[Any]) -> Any:
        if self.spec.type is None:
            return leaves[0]
        return tuple(leaves) if self.is_immutable else tree_unflatten(leaves, self.spec)

    @cached_property
    def is_immutable(self) -> bool:
        """Whether the value is a single leaf, or a tuple of leaves."""
        return self.spec.type is None or (self.spec.type is tuple and self.spec.num_nodes == self.spec.num_leaves + 1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles an example value instead of torch's tree spec, because pickling a spec prints a warning."""
        return _structure_of, (self.filled(range(self.spec.num_leaves)),)


def _structure_of(value: Any) -> Structure:
    return take_apart(value)[1]


SINGLE_LEAF = Structure(tree_flatten(0)[1])


def take_apart(value: Any) -> tuple[Leaves, Structure]:
    """Splits a value into its leaves and its structure. Dataclasses are split too.

    >>> @dataclass
    ... class Pair: first: int; rest: list
    >>> leaves, structure = take_apart((Pair(1, [2, 3]), 4))
    >>> leaves, structure.filled([5, 6, 7, 8])
    ([1, 2, 3, 4], (Pair(first=5, rest=[6, 7]), 8))
    """
    if isinstance(value, Tensor):
        return [value], SINGLE_LEAF
    leaves, spec = tree_flatten(value)
    if any(map(_is_dataclass, leaves)):
        leaves, spec = tree_flatten(tree_map(_opened, value))
    return leaves, Structure(spec)


def _is_dataclass(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _opened(leaf: Any) -> Any:
    """Replaces a dataclass, and dataclasses in it, by nodes that torch's trees look into."""
    if not _is_dataclass(leaf):
        return leaf
    return OpenDataclass(
        type(leaf), {field.name: tree_map(_opened, getattr(leaf, field.name)) for field in fields(leaf)}
    )


def is_carried(leaf: object) -> bool:
    """Whether an input is sent only to the layers that use it: a floating-point or complex tensor."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


@dataclass(frozen=True)
class Op:
    """One operation of a forward.

    Attributes:
        name: The name of the unit or function.
        is_unit: Whether the operation is a call of a unit.
        uses: The tensors among the arguments that are inputs of the forward or results of other operations.
        raw: The names of the parameters among the arguments.
        returns: The structure of the result.
        repeated: Leaves of the result that are the same tensors as earlier leaves.
        inner: Other units that the unit calls, or whose parameters it uses.
    """

    name: str
    is_unit: bool
    uses: frozenset[ValueId]
    raw: tuple[str, ...]
    returns: Structure
    repeated: Repeated
    inner: tuple[str, ...]


class Edge(NamedTuple):
    """One hop of a tensor, from a layer that has the tensor to the next layer that uses it (note "Relay")."""

    value_id: ValueId
    source: int
    target: int

    @property
    def pop(self) -> Pop:
        return Pop(f"{self.value_id}.{self.source}", self.source, self.target)


@dataclass(frozen=True)
class Trace:
    """The operations of a forward for inputs of one structure.

    Attributes:
        inputs: The structure of the inputs.
        carried: The inputs that are sent only to the layers that use them. Every layer has all other inputs.
        ops: The operations in order.
        starts: The index of the first operation of each layer.
        results: The tensors of the output that are operation results or inputs.
        output: The structure of the output.
        buffers: The names of the buffers that functions between units read.
        taken: The indices of the inputs that functions between units read.
        layouts: The shape and dtype of each operation result and input.
    """

    inputs: Structure
    carried: tuple[ValueId, ...]
    ops: tuple[Op, ...]
    starts: tuple[int, ...]
    results: frozenset[ValueId]
    output: Structure
    buffers: frozenset[str]
    taken: frozenset[int]
    layouts: Mapping[ValueId, tuple[tuple[int, ...], torch.dtype]]

    def layer_of(self, op: int) -> int:
        """Returns the layer that runs an operation. The inputs belong to the first layer."""
        return max(bisect_right(self.starts, op) - 1, 0)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        users: dict[ValueId, set[int]] = {value_id: {len(self.starts) - 1} for value_id in self.results}
        for index, op in enumerate(self.ops):
            for value_id in op.uses:
                users.setdefault(value_id, set()).add(self.layer_of(index))
        edges = []
        for value_id, layers in sorted(users.items()):
            source = self.layer_of(value_id.op)
            for layer in sorted(layers):
                if layer > source:
                    edges.append(Edge(value_id, source, layer))
                    source = layer
        return tuple(edges)

    @cached_property
    def inside(self) -> frozenset[int]:
        """The functions between units whose results no other layer uses. Their number of result tensors may vary."""
        crosses = {edge.value_id.op for edge in self.edges}
        return frozenset(index for index, op in enumerate(self.ops) if not op.is_unit and index not in crosses)

    def live_before(self, layer: int) -> list[ValueId]:
        """Returns the tensors that cross the boundary before a layer."""
        return [edge.value_id for edge in self.edges if edge.source < layer <= edge.target]


class Collected(NamedTuple):
    """The result of a unit, and the items that it appended to each open list."""

    returned: Any
    additions: list[list[Any]]


def open_lists(outside: Context) -> list[list[Any]]:
    """Returns the lists in context variables that have changed since `outside`. Units may append to these lists."""
    return [
        member
        for variable, value in copy_context().items()
        if value is not outside.get(variable)
        for member in (value.values() if isinstance(value, dict) else (value,))
        if isinstance(member, list)
    ]


class OpCall(NamedTuple):
    """A call of a unit, or of a function of torch between units.

    Attributes:
        name: The name of the unit or function.
        func: The unit or function.
        args: The positional arguments.
        kwargs: The keyword arguments.
        tensors: The tensors among the arguments, also in containers.
        lists: The open lists, to which a unit may append.
    """

    name: str
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    lists: Sequence[list[Any]] = ()

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
        """The unit that is called. None for a function."""
        return self.func if isinstance(self.func, nn.Module) else None

    def execute(self) -> Any:
        """Calls the function. If lists are open, moves the items that the function appends into the result."""
        if not self.lists:
            return self.func(*self.args, **self.kwargs)
        before = list(map(len, self.lists))
        try:
            returned = self.func(*self.args, **self.kwargs)
            return Collected(returned, [items[length:] for items, length in zip(self.lists, before, strict=True)])
        finally:
            for items, length in zip(self.lists, before, strict=True):
                del items[length:]

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "OpCall":
        """Returns the same call with each tensor replaced by `change(tensor)`."""
        args, kwargs = map_tensors((self.args, dict(self.kwargs)), change)
        return OpCall.of(self.name, self.func, args, kwargs, self.lists)


PLAIN = frozenset({bool, int, float, str, type(None)})


def _collect(values: Iterable[Any], tensors: list[Tensor]) -> None:
    for value in values:
        if type(value) in PLAIN:
            continue
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, tensors)
        elif isinstance(value, dict):
            _collect(value.values(), tensors)
        elif _is_dataclass(value):
            _collect((getattr(value, field.name) for field in fields(value)), tensors)
