"""The values of a forward: their names, what holds them, and what stands for those that are not there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor

from gpipe._torch.dispatcher import empty_on_meta
from gpipe._torch.modes import as_plain_tensors
from gpipe._torch.trees import TreeSpec, tree_flatten, tree_unflatten


class CannotSplitError(ValueError):
    """A model's forward does what cannot be computed in parts to the same bits; says what, where, and what to do."""


LAYOUT = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
        "is_signed", "__len__", "stride", "is_contiguous", "storage_offset", "get_device", "__hash__", "__repr__",
        "__str__", "__format__", "requires_grad_",
    }
)  # fmt: skip
"""What is asked of a tensor without a look at its values, beside its attributes."""
TENSORS_OF = frozenset(
    {
        "T", "mT", "H", "mH", "real", "imag", "data", "grad",
    }
)  # fmt: skip
"""The attributes of a tensor that are tensors themselves."""


def asks_for_layout(function: Callable[..., Any]) -> bool:
    """Whether a function of tensors, or the getter of an attribute, looks at no values.

    >>> asks_for_layout(Tensor.size), asks_for_layout(Tensor.shape.__get__), asks_for_layout(Tensor.mT.__get__)
    (True, True, False)
    """
    name = getattr(function, "__name__", "")
    return name in LAYOUT or (name == "__get__" and attribute_of(function) not in TENSORS_OF)


def attribute_of(getter: Callable[..., Any]) -> str:
    """The attribute that a getter, as `Tensor.shape.__get__`, is for."""
    return getattr(getattr(getter, "__self__", None), "__name__", "")


class Placeholder(Tensor):
    """A tensor without values: whoever asks for its layout gets it, whoever computes with it is refused.

    It lies on the meta device, so that nothing can compute with it unseen, and says where its values would be.
    """

    home: torch.device
    wants_gradient: bool

    @classmethod
    def like(
        cls, shape: Sequence[int], dtype: torch.dtype, home: torch.device, *, wants_gradient: bool
    ) -> "Placeholder":
        """Stands for a tensor of this layout.

        >>> there = Placeholder.like((2, 3), torch.float32, torch.device("cpu"), wants_gradient=True)
        >>> there.shape, there.dtype, there.device, there.requires_grad
        (torch.Size([2, 3]), torch.float32, device(type='cpu'), True)
        """
        made = empty_on_meta(shape, dtype).as_subclass(cls)
        made.home = home
        made.wants_gradient = wants_gradient
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers questions about the layout."""
        if not asks_for_layout(func):
            _refuse(func)
        with as_plain_tensors():
            name = attribute_of(func)
            asked = next((item for item in args if isinstance(item, cls)), None)
            if asked is None or "home" not in vars(asked):
                return func(*args, **(kwargs or {}))
            match name:
                case "device":
                    return asked.home
                case "requires_grad":
                    return asked.wants_gradient
                case "is_meta" | "is_cpu" | "is_cuda":
                    return asked.home.type == name.removeprefix("is_")
            return func(*args, **(kwargs or {}))


def _refuse(func: Callable[..., Any]) -> Never:
    name = getattr(func, "__name__", str(func))
    raise CannotSplitError(
        f"{name} needs a value that an earlier layer made, and that did not cross the cuts: on the sample it was not "
        f"needed here. The model's forward takes another path now; give a sample that takes it"
    )


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


class ValueId(NamedTuple):
    """Names a tensor in each interpretation: the operation that made it, and its place among what that returned.

    Inputs are what operation -1 made.
    """

    op: int
    leaf: int

    def __str__(self) -> str:
        return f"{self.op}.{self.leaf}"


def is_carried(leaf: object) -> bool:
    """Whether an input is carried only to those layers that use it: all but whole numbers, which every layer has."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


CARRIED_AS_THEY_ARE = (bool, int, float, str, type(None))


DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


OPAQUE = (
    "between blocks {name} is asked of a value that an earlier layer made and that cannot cross the cuts: it is "
    "neither a tensor nor a plain number or text (an array of numpy, an object of a class). Compute it by torch, "
    "or in a block"
)


_OPAQUE: list[Any] = []


class OpaquePlaceholder:
    """Stands for a value of a kind that does not cross cuts: whoever looks into it is refused."""

    def __getattr__(self, name: str) -> Never:
        """Refuses."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotSplitError(OPAQUE.format(name=name))


def describe(leaves: Sequence[Any]) -> list[Any]:
    """What is written down of what an operation returned.

    >>> describe([torch.ones(2, 3), 7, object()])
    [['torch.float32', [2, 3], False], [7], []]
    """
    return [
        [str(leaf.dtype), list(leaf.shape), leaf.requires_grad]
        if isinstance(leaf, Tensor)
        else ([leaf] if isinstance(leaf, CARRIED_AS_THEY_ARE) else _OPAQUE)
        for leaf in leaves
    ]


def stand_in(described: Sequence[Any], value_id: ValueId, device: torch.device) -> Any:
    """What stands for a leaf that did not cross: a plain value itself."""
    match described:
        case [dtype, shape, wants_gradient]:
            return _placeholder(value_id, dtype, tuple(shape), device, wants_gradient)
        case [value]:
            return value
    return OpaquePlaceholder()


@lru_cache(maxsize=1024)  # each micro-batch asks for the same; one for each id, since interpreters tell tensors apart
def _placeholder(
    value_id: ValueId, dtype: str, shape: tuple[int, ...], device: torch.device, wants_gradient: bool
) -> Placeholder:
    return Placeholder.like(shape, DTYPES[dtype], device, wants_gradient=wants_gradient)
