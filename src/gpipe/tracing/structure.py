"""What a part of a model returns, taken apart: its leaves, and what holds them, plain dataclasses among it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from gpipe._torch.trees import TreeSpec, tree_flatten, tree_unflatten

Leaves = list[Any]
Again = tuple[tuple[int, int], ...]
"""The leaves that are the same tensor as one before them, each with that."""


@dataclass(frozen=True)
class Structure:
    """What holds the leaves of a value; `inner` are the dataclasses among those of the tree, by their place."""

    spec: TreeSpec
    inner: tuple[tuple[int, type, "Structure"], ...] = ()

    def filled(self, leaves: Sequence[Any]) -> Any:
        """The value with these leaves."""
        if self is ONE:
            return leaves[0]
        if not self.inner:
            return tree_unflatten(list(leaves), self.spec)
        rest = list(leaves)
        outer: Leaves = []
        held = {at: (kind, structure) for at, kind, structure in self.inner}
        for at in range(self.spec.num_leaves):
            if at not in held:
                outer.append(rest.pop(0))
                continue
            kind, structure = held[at]
            some, rest = rest[: structure.count], rest[structure.count :]
            made: object = object.__new__(kind)
            for name, value in structure.filled(some).items():
                object.__setattr__(made, name, value)
            outer.append(made)
        return tree_unflatten(outer, self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle is made of a value of this structure: torch's own specs are not for that."""
        return _structure_of, (self.filled(range(self.count)),)

    @property
    def count(self) -> int:
        """The number of leaves."""
        return self.spec.num_leaves - len(self.inner) + sum(structure.count for _, _, structure in self.inner)


def _structure_of(value: Any) -> Structure:
    return take_apart(value)[1]


ONE = Structure(tree_flatten(0)[1])
"""Of a value that is one leaf."""


def take_apart(value: Any) -> tuple[Leaves, Structure]:
    """The leaves of a value, and its structure.

    >>> from types import SimpleNamespace
    >>> @dataclass
    ... class Made: one: int; more: list
    >>> leaves, structure = take_apart((Made(1, [2, 3]), 4))
    >>> leaves, structure.filled([5, 6, 7, 8])
    ([1, 2, 3, 4], (Made(one=5, more=[6, 7]), 8))
    """
    if isinstance(value, Tensor):
        return [value], ONE
    flat, spec = tree_flatten(value)
    if not any(is_dataclass(leaf) and not isinstance(leaf, type) for leaf in flat):
        return flat, Structure(spec)
    leaves: Leaves = []
    inner = []
    for at, leaf in enumerate(flat):
        if not is_dataclass(leaf) or isinstance(leaf, type):
            leaves.append(leaf)
            continue
        some, structure = take_apart({field.name: getattr(leaf, field.name) for field in fields(leaf)})
        inner.append((at, type(leaf), structure))
        leaves += some
    return leaves, Structure(spec, tuple(inner))


def again_in(leaves: Sequence[Any]) -> Again:
    """The places of tensors that stood before, each with the first place of that tensor.

    >>> tensor = Tensor()
    >>> again_in([tensor, 7, Tensor(), 7, tensor])
    ((4, 0),)
    """
    first: dict[int, int] = {}
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            first.setdefault(id(leaf), at)
    return tuple(
        (at, first[id(leaf)]) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and first[id(leaf)] != at
    )
