"""Splits a mini-batch into micro-batches, merges their outputs, and weighs uneven ones.

Finds what in inputs and targets cannot be split by rows into micro-batches, and says what to give instead.
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from operator import is_not
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from gpipe._torch.trees import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten
from gpipe.stages.tree import MAX_OBJECTS, OPAQUE, Tree, hides_tensors, tensors_in

Reduction: TypeAlias = Literal["mean", "sum"] | Callable[[Tree], object]


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor, a list or what else might have rows, that every micro-batch takes whole, however long it is.

    >>> import gpipe, torch
    >>> pipe = gpipe.GPipe([torch.nn.Identity()], partitions=1, micro_batches=2)
    >>> cosines = gpipe.Whole(torch.zeros(1, 8))  # not split, though the batch has 4 rows
    >>> with torch.no_grad():
    ...     pipe.step((torch.ones(4, 8), cosines), torch.ones(4, 8), lambda out, y: (out[0] + out[1] - y).mean())
    tensor(0.)
    """

    tensor: Tensor


@dataclass(frozen=True, eq=False, init=False)
class MicroBatches(Sequence[Tree]):
    """Ready-made micro-batches, in place of a mini-batch: nothing is split, and each has rows and lengths of its own.

    An element is one micro-batch: all that the first layer takes of it or, as a target, all that the loss takes.

    Args:
        parts: The micro-batches, at least one and at most M.

    Raises:
        ValueError: There are none, or one is ready-made micro-batches itself.
        TypeError: It is one value and no sequence of micro-batches.

    >>> import gpipe, torch
    >>> pipe = gpipe.GPipe([torch.nn.Identity()], partitions=1, micro_batches=4)
    >>> sentences = gpipe.MicroBatches([torch.ones(3, 5), torch.ones(2, 9)])  # each padded by itself
    >>> [output.shape for output in pipe(sentences)]
    [torch.Size([3, 5]), torch.Size([2, 9])]
    """

    parts: tuple[Tree, ...]

    def __init__(self, parts: Iterable[Tree]) -> None:
        if isinstance(parts, (Tensor, Mapping, str, bytes)) or not isinstance(parts, Iterable):
            raise TypeError(
                f"gpipe.MicroBatches takes a list with an element for each micro-batch, "
                f"gpipe.MicroBatches([first, second, ...]), and not a {type(parts).__name__}"
            )
        object.__setattr__(self, "parts", tuple(parts))
        if not self.parts:
            raise ValueError("gpipe.MicroBatches of nothing: give at least one micro-batch, or skip this step")
        if any(isinstance(part, MicroBatches) for part in self.parts):
            raise ValueError(
                "a micro-batch is gpipe.MicroBatches itself; give all micro-batches in one list: "
                "gpipe.MicroBatches([*some, *others])"
            )

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, at: Any) -> Any:
        return MicroBatches(self.parts[at]) if isinstance(at, slice) else self.parts[at]


def plain(value: Tree) -> Tree:
    """A mapping of a class that torch's trees do not know, such as what a tokenizer gives, as a dict."""
    if isinstance(value, MicroBatches):
        return MicroBatches([plain(part) for part in value])
    return dict(value) if isinstance(value, UserDict) else value


def as_tree(given: Tree) -> Tree:
    """What was given as a tree: of ready-made micro-batches, all of them."""
    return given.parts if isinstance(given, MicroBatches) else given


def take_parts(given: MicroBatches) -> list[Tree]:
    """Ready-made micro-batches as the layers take them, with what is wrapped in `Whole` as it is."""
    return [tree_map(lambda leaf: leaf.tensor if isinstance(leaf, Whole) else leaf, part) for part in given.parts]


def count_rows(inputs: Tree, at: int | None = None) -> int:
    """N, the rows of a mini-batch, or of micro-batch `at`: the first dimension of its first tensor that has one."""
    holds, is_empty, remedy = "the inputs hold", "the mini-batch is empty", "skip this batch"
    if at is not None:
        holds, is_empty, remedy = f"inputs[{at}] holds", f"inputs[{at}] is empty", "leave this micro-batch out"
    leaves = tree_leaves(inputs)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), None)
    if first is not None and len(first):
        return len(first)
    if first is not None:
        raise ValueError(f"{is_empty}: its first tensor has shape {tuple(first.shape)}; {remedy}")
    if leaves and all(isinstance(leaf, (int, float)) for leaf in leaves):
        instead = f"not numbers in a {type(inputs).__name__}: torch.tensor(...) makes one of them"
    elif isinstance(inputs, (dict, list, tuple)) and not leaves:
        instead = f"not an empty {type(inputs).__name__}"
    else:
        instead = f"not {'None' if inputs is None else 'a ' + type(inputs).__name__} without one"
    raise ValueError(
        f"{holds} no tensor with rows; give at least one tensor whose first dimension is the batch, {instead}"
    )


POSITIONS = "position_ids"  # of the name of what multimodal models take as [3, rows, tokens]
OFFSETS = "cu_seq"  # of the name of what says where in packed rows each sequence begins: cu_seqlens, cu_seq_lens_q
PACKED = (
    "{path} says where sequences begin that are packed behind one another, and {rows} rows of the mini-batch "
    "are to be split without regard to them: each micro-batch needs offsets of its own. Pack each micro-batch by "
    "itself, gpipe.MicroBatches([first, second, ...]), or put the sequences into rows, padded"
)
AS_LONG = (
    "{path} is a {kind} of {rows} values, as many as the mini-batch has rows, and only tensors are split by rows; "
    "make it a tensor, torch.tensor(...), or give each micro-batch its own, gpipe.MicroBatches([...]), or wrap it "
    "(or the object that has it) in gpipe.Whole if every micro-batch needs all of it"
)

NOT_ROWS = (
    "{path} has shape {shape}, but the mini-batch has {rows} rows; split by rows, or wrap it in gpipe.Whole if every "
    "micro-batch needs all of it"
)
TWICE = "{path} has shape {shape}, and its first or its second dimension may be the {rows} rows of the mini-batch"
LATER = (
    ". If the rows are its dimension {at}, split all tensors yourself: gpipe.MicroBatches([...]), also for sample="
)


def split(tree: Tree, rows: int, parts: int, what: str, *, strict: bool = False) -> list[Tree]:
    """Splits each tensor of `rows` rows as `tensor_split` does: the first parts are one row larger.

    Tensors without dimensions, other values and what is wrapped in `Whole` go to every part as they are. What may
    have an entry for each row and is no tensor is refused if `strict`: any sequence or array of that length, also in
    an attribute, but a `torch.Size`, and those that hold tensors with rows. So are offsets of packed rows, always.
    """
    if type(tree) is Tensor and tree.dim() > 0 and tree.shape[0] == rows:
        return list(tree.tensor_split(parts))
    if mistakes := [*_find_uncut(tree, rows, what, offsets=parts > 1, strict=strict and parts > 1)]:
        raise ValueError("\n".join(mistakes))
    leaves, spec = tree_flatten(tree)
    columns: list[Sequence[object]] = [
        leaf.tensor_split(parts)
        if parts > 1 and isinstance(leaf, Tensor) and leaf.dim() > 0
        else [leaf.tensor if isinstance(leaf, Whole) else leaf] * parts
        for leaf in leaves
    ]
    return [tree_unflatten([column[part] for column in columns], spec) for part in range(parts)]


def _find_uncut(tree: Tree, rows: int, what: str, *, offsets: bool, strict: bool) -> Iterator[str]:
    for path, value in _seen_in(tree, what):
        length, of_tensor = _length(value), isinstance(value, Tensor)
        if length and (OFFSETS in path.lower() or ((length != rows or not of_tensor) and _rises_to(rows, value))):
            if offsets:
                yield PACKED.format(path=path, rows=rows)
        elif of_tensor and length is not None:
            twice = offsets and POSITIONS in path and value.dim() == 3 and value.shape[:2] == (rows, rows)
            if twice or length != rows:
                later = LATER.format(at=[*value.shape].index(rows, 1)) if rows in value.shape[1:] else ""
                text = (TWICE if twice else NOT_ROWS) + later
                yield text.format(path=path, shape=tuple(value.shape), rows=rows)
        elif strict and length == rows and not of_tensor:
            yield AS_LONG.format(path=path, rows=rows, kind=type(value).__name__)


def _seen_in(tree: Tree, what: str) -> Iterator[tuple[str, Any]]:
    """A value and all that can be seen in it, also in attributes of objects, each with its path."""
    todo, seen = [(what, tree)], dict[int, object]()
    while todo and len(seen) < MAX_OBJECTS:
        path, value = todo.pop()
        yield path, value
        if id(value) in seen or isinstance(value, (Tensor, Whole, nn.Module, *OPAQUE)):
            continue
        seen[id(value)] = value
        if type(value) in (dict, list, tuple):  # as torch does, sooner
            pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
            inner = [(f"[{key!r}]", one) for key, one in pairs]
        else:
            leaves, _ = tree_flatten_with_path(value, is_leaf=partial(is_not, value))
            inner = [(keystr(at), one) for at, one in leaves]
        if len(inner) == 1 and inner[0][1] is value:  # an object
            with suppress(Exception):  # some raise when they are asked for attributes
                names: Any = getattr(value, "__dataclass_fields__", None) or getattr(value, "__dict__", ())
                inner = [(f".{name}", getattr(value, name, None)) for name in names]
        todo += [(f"{path}{at}", one) for at, one in reversed(inner)]


def _length(value: Any) -> int | None:
    """How many entries a value has, if none of them has rows of its own; None if it does not tell."""
    if isinstance(value, (str, bytes, torch.Size)):
        return None
    if hasattr(type(value), "__array__"):  # a tensor, or of numpy and the like
        return next(iter(getattr(value, "shape", ())), None)
    held = tree_leaves(value) if isinstance(value, Sequence) else []
    rows = any(isinstance(one, Whole) or (isinstance(one, Tensor) and one.dim()) for one in held)
    with suppress(Exception):
        return None if rows or all(one is None for one in held) else len(value)
    return None


def _rises_to(rows: int, value: Any) -> bool:
    """Whether a value has whole numbers in order, from 0 to so many, or tensors of them."""
    if isinstance(value, Tensor) and (value.is_meta or value.dim() != 1 or value.is_floating_point()):
        return False
    try:
        numbers = [one.item() if isinstance(one, Tensor) else one for one in value]
    except Exception:  # of code of its class
        return False
    whole = all(isinstance(one, Integral) for one in numbers)
    return whole and sorted(numbers) == numbers and (numbers[0], numbers[-1]) == (0, rows)


CANNOT_MERGE = (
    "the outputs of the micro-batches cannot be put together: output{path} {why}. Have the rows of the micro-batch "
    "in the first dimension; or use step(), where the loss sees each micro-batch's output; or give the micro-batches "
    "as gpipe.MicroBatches([...]), for a list of their outputs"
)
SEVERAL_ROWS = (
    "output{path} has several rows for each row of the mini-batch, and those of the micro-batches are put one behind "
    "the other: right if rows and positions are flattened into the first dimension, wrong if that is anything else"
)


def merge(parts: Sequence[Tree], rows: Sequence[int], tell: Callable[[Sequence[str]], object] | None = None) -> Tree:
    """Puts the outputs of micro-batches of so many rows together again; what is no tensor must be the same for all.

    With somebody to `tell` of it, an output may have several rows for each; else it may be one tensor for all.
    """
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Tensor) for part in parts):  # torch's walks of trees leave cycles behind
        return _merge_leaf("", parts, rows, tell)
    flat = [tree_flatten_with_path(part) for part in parts]
    if any(spec != flat[0][1] for _, spec in flat):
        raise TypeError(CANNOT_MERGE.format(path="", why="has other parts for one micro-batch than for another"))
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten(
        [_merge_leaf(keystr(column[0][0]), [leaf for _, leaf in column], rows, tell) for column in columns],
        flat[0][1],
    )


def _merge_leaf(
    path: str, leaves: Sequence[Any], rows: Sequence[int], tell: Callable[[Sequence[str]], object] | None
) -> object:
    first, why = leaves[0], f"is {leaves[0]!r} for one micro-batch and another for others"
    if isinstance(first, Tensor):
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        times = len(first) // rows[0] if tell and first.dim() else 1
        if first.dim() and shapes == [(count * times, *first.shape[1:]) for count in rows]:
            if tell and times > 1:
                tell([SEVERAL_ROWS.format(path=path)])
            return torch.cat([*leaves])
        found = (f"{shape} for {count} rows" for shape, count in zip(shapes, rows, strict=True))
        why = f"has the shape {' and '.join(dict.fromkeys(found))}"
        same = tell is None and len(set(shapes)) == 1 and all(leaf is first or leaf.equal(first) for leaf in leaves)
    else:
        same = all(leaf is first or (not isinstance(leaf, Tensor) and leaf == first) for leaf in leaves)
    if not same:
        raise TypeError(CANNOT_MERGE.format(path=path, why=why))
    return first


def rows_of_parts(rows: int, parts: int) -> list[int]:
    """The rows of each micro-batch, where a mini-batch has so many: the first ones have one more."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def loss_weights(
    reduction: Reduction,
    rows: Sequence[int],
    targets: Sequence[Tree],
    over_replicas: Callable[[float], float] = float,  # adds the weight of this mini-batch to that of the others
) -> list[float]:
    """The share w_i of each micro-batch in the loss: 1 each for "sum", else in proportion, in float64."""
    if reduction == "sum":
        return [1.0] * len(rows)
    if reduction == "mean":
        raw = [float(n) for n in rows]
    elif callable(reduction):
        raw = [_weight(reduction(target)) for target in targets]
    else:
        raise TypeError(f"reduction={reduction!r}: give 'mean', 'sum' or a function of the target giving a weight")
    if not all(0 <= weight < float("inf") for weight in raw):
        raise ValueError(f"the weights of the micro-batches are {raw}; each must be finite and at least 0")
    total = over_replicas(sum(raw))
    if total == 0:
        raise ValueError("the weights of all micro-batches are 0: there is nothing to average; skip this mini-batch")
    return [weight / total for weight in raw]


def _weight(returned: object) -> float:
    try:
        return float(returned)  # type: ignore[arg-type]  # whatever float takes
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
        raise TypeError(
            f"reduction must return the weight of a micro-batch, one number such as how many labels count; it "
            f"returned {found}"
        ) from error


IGNORED = -100  # the label that torch's losses ignore by default, and users' losses by habit
TWO_ROWS = 2  # on which a model's forward is recorded, if there are so many: BatchNorm in training refuses one


def first_micro_batch(sample: Tree, micro_batches: int, least: int = 1) -> Tree:
    """The first micro-batch of a sample with labels that count, of so many rows at least, if it has them."""
    if sample is None:
        return None
    if isinstance(sample, MicroBatches):
        parts = take_parts(sample)
    else:
        parts = split(sample, rows := count_rows(sample), min(micro_batches, max(rows // least, 1)), "sample")

    def counts(part: Tree) -> bool:
        return not any(not leaf.is_meta and (leaf == IGNORED).all() for leaf in tensors_in(part))

    return next(filter(counts, parts), parts[0])


INSIDE = (
    "gpipe.MicroBatches, which stand for all inputs or all targets and in no other value; put the other values into "
    "each micro-batch: gpipe.MicroBatches([(x, mask), ...])"
)
NUMPY = "a numpy array{}; give a tensor: torch.from_numpy(...)"


def find_unsplittable(what: str, tree: Tree) -> Iterator[str]:
    """What is in a tree that cannot be split into micro-batches, or be one of them, each with what to do."""
    if type(tree) is Tensor and tree.layout is torch.strided and not tree.is_nested:
        return
    ready_made = isinstance(tree, MicroBatches)
    leaves, _ = tree_flatten_with_path(as_tree(tree), is_leaf=lambda value: isinstance(value, PackedSequence))
    for path, leaf in leaves:
        is_plain = isinstance(leaf, (*OPAQUE, torch.Generator, np.generic))
        if not is_plain and (found := _why_not_split(leaf, ready_made=ready_made)):
            yield f"{what}{keystr(path)} is {found}"


def _why_not_split(leaf: object, *, ready_made: bool) -> str | None:
    name = f"a {type(leaf).__name__}"
    match leaf:
        case Tensor() if leaf.is_nested:
            return (
                "a nested tensor, which has no rows to split; pad it (torch.nested.to_padded_tensor), and give a mask"
            )
        case Tensor() if leaf.layout is not torch.strided and not ready_made:
            return f"sparse ({leaf.layout}), which cannot be split into micro-batches; give t.to_dense()"
        case MicroBatches():
            return INSIDE
        case Whole(np.ndarray()):
            return NUMPY.format(" in gpipe.Whole")
        case Whole(MicroBatches()):
            return f"gpipe.Whole with {INSIDE}"
        case Tensor() | Whole():
            return None
        case np.ndarray():
            return NUMPY.format("")
        case PackedSequence():
            return f"{name}; give it padded, by nn.utils.rnn.pad_packed_sequence, and the lengths"
        case DataLoader() | Dataset() | Iterator():
            return f"{name}; give one mini-batch of it at a time: for x, y in ...: pipe.step(x, y, loss_fn)"
    if hasattr(type(leaf), "__array__"):  # of pandas, JAX and the like
        return f"{name}; give a tensor: torch.as_tensor(numpy.asarray(...))"
    if hides_tensors(leaf):
        return (
            f"{name} that holds tensors, which cannot be seen, and so not be split; give tuples, lists or dicts of "
            f"tensors, register the class by torch.utils._pytree.register_pytree_node, or wrap it in gpipe.Whole if "
            f"every micro-batch needs it whole"
        )
    return None
