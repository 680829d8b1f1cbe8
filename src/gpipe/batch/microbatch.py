"""Splits a mini-batch into micro-batches, merges their outputs, and computes their weights in the loss.

Rejects values in inputs and targets that cannot be split by rows.
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
    """Wraps a tensor, or another value, that every micro-batch receives without splitting.

    Args:
        tensor: The value, which does not need a batch dimension.

    >>> import gpipe, torch
    >>> pipe = gpipe.GPipe([torch.nn.Identity()], partitions=1, micro_batches=2)
    >>> cosines = gpipe.Whole(torch.zeros(1, 8))  # not split, although the batch has 4 rows
    >>> with torch.no_grad():
    ...     pipe.step((torch.ones(4, 8), cosines), torch.ones(4, 8), lambda out, y: (out[0] + out[1] - y).mean())
    tensor(0.)
    """

    tensor: Tensor


@dataclass(frozen=True, eq=False, init=False)
class MicroBatches(Sequence[Tree]):
    """A mini-batch that is already split. gpipe uses its elements as micro-batches without splitting them.

    Each element is one micro-batch, with its own number of rows and its own lengths. If you pass it as inputs, each
    element has all arguments of the first layer. If you pass it as targets, each element has all values that the loss
    needs.

    Args:
        parts: The micro-batches, at least 1 and at most M.

    Raises:
        ValueError: If `parts` is empty, or if an element is itself a `MicroBatches`.
        TypeError: If `parts` is a single value, such as a tensor.

    >>> import gpipe, torch
    >>> pipe = gpipe.GPipe([torch.nn.Identity()], partitions=1, micro_batches=4)
    >>> sentences = gpipe.MicroBatches([torch.ones(3, 5), torch.ones(2, 9)])  # padded separately
    >>> [output.shape for output in pipe(sentences)]
    [torch.Size([3, 5]), torch.Size([2, 9])]
    """

    parts: tuple[Tree, ...]

    def __init__(self, parts: Iterable[Tree]) -> None:
        if isinstance(parts, (Tensor, Mapping, str, bytes)) or not isinstance(parts, Iterable):
            raise TypeError(
                f"gpipe.MicroBatches() got a {type(parts).__name__}, not a list of micro-batches. Pass a list with "
                f"one element per micro-batch: gpipe.MicroBatches([first, second, ...])."
            )
        object.__setattr__(self, "parts", tuple(parts))
        if not self.parts:
            raise ValueError("gpipe.MicroBatches() got no micro-batches. Pass at least one, or skip this step.")
        if any(isinstance(part, MicroBatches) for part in self.parts):
            raise ValueError(
                "gpipe.MicroBatches() got an element that is a gpipe.MicroBatches itself. Pass all micro-batches in "
                "one list: gpipe.MicroBatches([*first, *second])."
            )

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        return MicroBatches(self.parts[index]) if isinstance(index, slice) else self.parts[index]


def plain(value: Tree) -> Tree:
    """Converts a `UserDict`, such as the output of a tokenizer, to a dict, which torch's pytree functions support."""
    if isinstance(value, MicroBatches):
        return MicroBatches([plain(part) for part in value])
    return dict(value) if isinstance(value, UserDict) else value


def as_tree(value: Tree) -> Tree:
    """Returns a tuple of all micro-batches for `MicroBatches`, and any other value unchanged."""
    return value.parts if isinstance(value, MicroBatches) else value


def take_parts(micro_batches: MicroBatches) -> list[Tree]:
    """Returns the micro-batches as the layers receive them, with each `Whole` replaced by its tensor."""
    return [
        tree_map(lambda leaf: leaf.tensor if isinstance(leaf, Whole) else leaf, part) for part in micro_batches.parts
    ]


def count_rows(inputs: Tree, index: int | None = None) -> int:
    """Returns the number of rows: the first dimension of the first tensor that is not a scalar.

    Args:
        inputs: The inputs of a mini-batch, or of one micro-batch.
        index: The number of the micro-batch, if it is one of `gpipe.MicroBatches`.

    Raises:
        ValueError: If all tensors are scalars, or if the first dimension is 0.
    """
    name, unit = ("inputs", "mini-batch") if index is None else (f"inputs[{index}]", "micro-batch")
    leaves = tree_leaves(inputs)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), None)
    if first is not None and len(first):
        return len(first)
    if first is not None:
        raise ValueError(
            f"{name}: the {unit} has no rows, because its first tensor has shape {tuple(first.shape)}. Skip this "
            f"{unit}. [no-rows]"
        )
    kind = "None" if inputs is None else f"a {type(inputs).__name__}"
    if leaves and all(isinstance(leaf, (int, float)) for leaf in leaves):
        kind = f"a {type(inputs).__name__} of numbers"
    elif isinstance(inputs, (dict, list, tuple)) and not leaves:
        kind = f"an empty {type(inputs).__name__}"
    raise ValueError(
        f"{name} is {kind} and has no tensor with a batch dimension. Pass at least one tensor whose first dimension "
        f"is the batch; torch.tensor(...) converts numbers. [no-batch-dimension]"
    )


POSITIONS = "position_ids"
"""Part of the name of a tensor that has shape [3, rows, tokens] in multimodal models."""
OFFSETS = "cu_seq"
"""Part of the name of the offsets of packed sequences: cu_seqlens, cu_seq_lens_q."""
PACKED = (
    "{path} has the offsets of packed sequences, which do not fit micro-batches of the {rows} rows. Pack each "
    "micro-batch separately: gpipe.MicroBatches([first, second, ...]). [packed-offsets]"
)
SEQUENCE = (
    "{path} is a {kind} with {rows} entries, one per row of the mini-batch, but only tensors are split. Convert it "
    "with torch.tensor(...), or wrap it (or its object) in gpipe.Whole if every micro-batch needs all entries. "
    "[sequence-not-split]"
)
NOT_ROWS = (
    "{path} has shape {shape}, but the mini-batch has {rows} rows. Pass a tensor with {rows} rows, or wrap this "
    "tensor in gpipe.Whole if every micro-batch needs all of it. [rows-differ]"
)
ROWS_IN_LATER_DIMENSION = (
    "{path} has shape {shape}, but the mini-batch has {rows} rows. If dimension {dimension} holds the rows, split "
    "all tensors yourself and pass gpipe.MicroBatches([...]), also as sample=. [rows-in-later-dimension]"
)
AMBIGUOUS_ROWS = (
    "{path} has shape {shape}, and either of its first two dimensions can be the {rows} rows. If dimension 1 holds "
    "the rows, split all tensors yourself and pass gpipe.MicroBatches([...]), also as sample=. [ambiguous-rows]"
)


def split(tree: Tree, rows: int, parts: int, name: str, *, strict: bool = False) -> list[Tree]:
    """Splits each tensor in a tree by rows, like `torch.tensor_split`: the first parts may have one more row.

    Scalar tensors, values that are not tensors, and values in `Whole` are not split. Every part receives them.

    Args:
        tree: The inputs or targets of a mini-batch.
        rows: The number of rows of the mini-batch.
        parts: The number of micro-batches.
        name: The name of the argument, for messages.
        strict: Whether to reject sequences and arrays (other than tensors) with one entry per row, also in attributes
            of objects. `torch.Size` and sequences of tensors with rows are always allowed.

    Raises:
        ValueError: If a tensor has a different number of rows, if `strict` rejects a value, or if a value holds the
            offsets of packed sequences.
    """
    if type(tree) is Tensor and tree.dim() > 0 and tree.shape[0] == rows:
        return list(tree.tensor_split(parts))
    if errors := [*_find_unsplit(tree, rows, name, offsets=parts > 1, strict=strict and parts > 1)]:
        raise ValueError("\n".join(errors))
    leaves, spec = tree_flatten(tree)
    columns: list[Sequence[object]] = [
        leaf.tensor_split(parts)
        if parts > 1 and isinstance(leaf, Tensor) and leaf.dim() > 0
        else [leaf.tensor if isinstance(leaf, Whole) else leaf] * parts
        for leaf in leaves
    ]
    return [tree_unflatten([column[part] for column in columns], spec) for part in range(parts)]


def _find_unsplit(tree: Tree, rows: int, name: str, *, offsets: bool, strict: bool) -> Iterator[str]:
    """Yields a message for each value that `split` rejects."""
    for path, value in _walk(tree, name):
        length, is_tensor = _length(value), isinstance(value, Tensor)
        if length and (OFFSETS in path.lower() or ((length != rows or not is_tensor) and _are_offsets(value, rows))):
            if offsets:
                yield PACKED.format(path=path, rows=rows)
        elif is_tensor and length is not None:
            ambiguous = offsets and POSITIONS in path and value.dim() == 3 and value.shape[:2] == (rows, rows)
            if ambiguous or length != rows:
                later = rows in value.shape[1:]
                text = AMBIGUOUS_ROWS if ambiguous else ROWS_IN_LATER_DIMENSION if later else NOT_ROWS
                dimension = [*value.shape].index(rows, 1) if later else None
                yield text.format(path=path, shape=tuple(value.shape), rows=rows, dimension=dimension)
        elif strict and length == rows and not is_tensor:
            yield SEQUENCE.format(path=path, rows=rows, kind=type(value).__name__)


def _walk(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
    """Yields a value and all values reachable by items and attributes, each with its path."""
    pending, seen = [(name, tree)], dict[int, object]()
    while pending and len(seen) < MAX_OBJECTS:
        path, value = pending.pop()
        yield path, value
        if id(value) in seen or isinstance(value, (Tensor, Whole, nn.Module, *OPAQUE)):
            continue
        seen[id(value)] = value
        if type(value) in (dict, list, tuple):  # The same result as torch's pytree functions, but faster.
            pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
            inner = [(f"[{key!r}]", item) for key, item in pairs]
        else:
            leaves, _ = tree_flatten_with_path(value, is_leaf=partial(is_not, value))
            inner = [(keystr(keys), item) for keys, item in leaves]
        if len(inner) == 1 and inner[0][1] is value:  # The value is a leaf for torch: look at its attributes.
            with suppress(Exception):  # Attribute access runs code of the object's class.
                attributes: Any = getattr(value, "__dataclass_fields__", None) or getattr(value, "__dict__", ())
                inner = [(f".{attribute}", getattr(value, attribute, None)) for attribute in attributes]
        pending += [(f"{path}{keys}", item) for keys, item in reversed(inner)]


def _length(value: Any) -> int | None:
    """Returns the number of entries. None for scalars, strings, `torch.Size` and sequences of tensors with rows."""
    if isinstance(value, (str, bytes, torch.Size)):
        return None
    if hasattr(type(value), "__array__"):  # A tensor, or an array of NumPy, pandas or JAX.
        return next(iter(getattr(value, "shape", ())), None)
    items = tree_leaves(value) if isinstance(value, Sequence) else []
    have_rows = any(isinstance(item, Whole) or (isinstance(item, Tensor) and item.dim()) for item in items)
    with suppress(Exception):
        return None if have_rows or all(item is None for item in items) else len(value)
    return None


def _are_offsets(value: Any, rows: int) -> bool:
    """Whether the entries are integers in ascending order, from 0 to the number of rows."""
    if isinstance(value, Tensor) and (value.is_meta or value.dim() != 1 or value.is_floating_point()):
        return False
    try:
        numbers = [item.item() if isinstance(item, Tensor) else item for item in value]
    except Exception:  # Iteration runs code of the object's class.
        return False
    are_integers = all(isinstance(item, Integral) for item in numbers)
    return are_integers and sorted(numbers) == numbers and (numbers[0], numbers[-1]) == (0, rows)


CANNOT_MERGE = (
    "output{path} {problem}, so the outputs of the micro-batches cannot be joined. Return the rows of the "
    "micro-batch in the first dimension, use step(), or pass gpipe.MicroBatches([...]) to get a list. "
    "[outputs-cannot-be-joined]"
)
SEVERAL_ROWS = (
    "output{path} has several rows for each row of the mini-batch, and gpipe concatenates them along the first "
    "dimension. Ignore this message if a layer flattens rows and positions. Otherwise return the rows in the first "
    "dimension. [several-output-rows]"
)


def merge(
    parts: Sequence[Tree], rows: Sequence[int], report: Callable[[Sequence[str]], object] | None = None
) -> Tree:
    """Concatenates the outputs of micro-batches.

    Values that are not tensors must be equal in all micro-batches.

    Args:
        parts: The output of each micro-batch.
        rows: The number of rows of each micro-batch.
        report: A function that receives findings. If it is passed, an output may have several rows for each input
            row. Otherwise, the same tensor may be the output of all micro-batches.

    Raises:
        TypeError: If the outputs cannot be concatenated.
    """
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Tensor) for part in parts):  # torch's pytree functions create reference cycles.
        return _merge_leaf("", parts, rows, report)
    flat = [tree_flatten_with_path(part) for part in parts]
    if any(spec != flat[0][1] for _, spec in flat):
        problem = "does not have the same structure in all micro-batches"
        raise TypeError(CANNOT_MERGE.format(path="", problem=problem))
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten(
        [_merge_leaf(keystr(column[0][0]), [leaf for _, leaf in column], rows, report) for column in columns],
        flat[0][1],
    )


def _merge_leaf(
    path: str, leaves: Sequence[Any], rows: Sequence[int], report: Callable[[Sequence[str]], object] | None
) -> object:
    first, problem = leaves[0], f"is {leaves[0]!r} for the first micro-batch but not for all micro-batches"
    if isinstance(first, Tensor):
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        times = len(first) // rows[0] if report and first.dim() else 1
        if first.dim() and shapes == [(count * times, *first.shape[1:]) for count in rows]:
            if report and times > 1:
                report([SEVERAL_ROWS.format(path=path)])
            return torch.cat([*leaves])
        each = (f"{shape} for {count} rows" for shape, count in zip(shapes, rows, strict=True))
        problem = f"has the shape {' and '.join(dict.fromkeys(each))}"
        same = report is None and len(set(shapes)) == 1 and all(leaf is first or leaf.equal(first) for leaf in leaves)
    else:
        same = all(leaf is first or (not isinstance(leaf, Tensor) and leaf == first) for leaf in leaves)
    if not same:
        raise TypeError(CANNOT_MERGE.format(path=path, problem=problem))
    return first


def rows_of_parts(rows: int, parts: int) -> list[int]:
    """Returns the number of rows of each micro-batch. The first micro-batches may have one more row."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def loss_weights(
    reduction: Reduction,
    rows: Sequence[int],
    targets: Sequence[Tree],
    over_replicas: Callable[[float], float] = float,
) -> list[float]:
    """Returns the weight of each micro-batch in the loss of the mini-batch.

    Args:
        reduction: "sum" for weights of 1, "mean" for weights proportional to the rows, or a function that returns the
            weight for a target.
        rows: The number of rows of each micro-batch.
        targets: The target of each micro-batch.
        over_replicas: Returns the sum of a weight over the data-parallel replicas. Default: there is one replica.

    Raises:
        TypeError: If `reduction` is not one of these values, or if the function does not return a number.
        ValueError: If a weight is negative or not finite, or if all weights are 0.
    """
    if reduction == "sum":
        return [1.0] * len(rows)
    if reduction == "mean":
        weights = [float(n) for n in rows]
    elif callable(reduction):
        weights = [_weight(reduction(target)) for target in targets]
    else:
        raise TypeError(f"reduction={reduction!r} is not valid. Pass 'mean', 'sum', or a function target -> weight.")
    if not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError(
            f"reduction= returned the weights {weights} for the micro-batches. Return finite weights of at least 0. "
            f"[invalid-loss-weights]"
        )
    total = over_replicas(sum(weights))
    if total == 0:
        raise ValueError(
            "The weights of all micro-batches are 0, so there is nothing to average. Skip this mini-batch. "
            "[all-weights-zero]"
        )
    return [weight / total for weight in weights]


def _weight(value: object) -> float:
    """Converts the result of the user's reduction function to a float."""
    try:
        return float(value)  # type: ignore[arg-type]  # whatever float accepts
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(
            f"reduction= returned {kind}. Return the weight of the micro-batch as one number, such as its number of "
            f"labels that count. [invalid-loss-weights]"
        ) from error


IGNORED = -100
"""The default `ignore_index` of torch's losses, which custom losses also use."""
TWO_ROWS = 2
"""The number of rows for tracing a model, if the sample has enough. BatchNorm in training mode rejects one row."""


def first_micro_batch(sample: Tree, micro_batches: int, least: int = 1) -> Tree:
    """Returns the first micro-batch of a sample in which some labels are not ignored, or else the first micro-batch.

    Args:
        sample: A mini-batch, or None.
        micro_batches: M.
        least: The minimum number of rows of the micro-batch, if the sample has that many.
    """
    if sample is None:
        return None
    if isinstance(sample, MicroBatches):
        parts = take_parts(sample)
    else:
        parts = split(sample, rows := count_rows(sample), min(micro_batches, max(rows // least, 1)), "sample")

    def has_labels(part: Tree) -> bool:
        return not any(not leaf.is_meta and (leaf == IGNORED).all() for leaf in tensors_in(part))

    return next(filter(has_labels, parts), parts[0])


NESTED_MICRO_BATCHES = (
    "{path} contains gpipe.MicroBatches, which must be the whole inputs or targets. Put the other values into each "
    "micro-batch: gpipe.MicroBatches([(x, mask), ...]). [nested-micro-batches]"
)
NUMPY = (
    "{path} is a numpy array, but only tensors are split. Convert it with torch.from_numpy(...). [array-not-tensor]"
)
ARRAY = (
    "{path} is a {kind}, but only tensors are split. Convert it with torch.as_tensor(numpy.asarray(...)). "
    "[array-not-tensor]"
)
NESTED_TENSOR = (
    "{path} is a nested tensor, which cannot be split by rows. Convert it with torch.nested.to_padded_tensor(...) "
    "and pass a mask. [nested-tensor]"
)
SPARSE = "{path} is sparse ({layout}) and cannot be split. Convert it with {path}.to_dense(). [sparse-input]"
PACKED_SEQUENCE = (
    "{path} is a {kind}, which cannot be split by rows. Pass the padded tensor and the lengths that "
    "nn.utils.rnn.pad_packed_sequence(...) returns. [packed-sequence]"
)
LOADER = (
    "{path} is a {kind}, not a mini-batch. Pass one mini-batch at a time: for x, y in loader: pipe.step(x, y, "
    "loss_fn). [loader-not-batch]"
)
OBJECT_WITH_TENSORS = (
    "{path} is a {kind} that holds tensors, but gpipe only splits tensors in tuples, lists and dicts. Register the "
    "class with torch.utils._pytree.register_pytree_node, or wrap the object in gpipe.Whole. [object-with-tensors]"
)


def find_unsplittable(name: str, tree: Tree) -> Iterator[str]:
    """Yields a message for each value that can neither be split nor be passed to every micro-batch."""
    if type(tree) is Tensor and tree.layout is torch.strided and not tree.is_nested:
        return
    ready_made = isinstance(tree, MicroBatches)
    leaves, _ = tree_flatten_with_path(as_tree(tree), is_leaf=lambda value: isinstance(value, PackedSequence))
    for keys, leaf in leaves:
        is_plain = isinstance(leaf, (*OPAQUE, torch.Generator, np.generic))
        if not is_plain and (text := _why_not_split(leaf, ready_made=ready_made)):
            layout = leaf.layout if isinstance(leaf, Tensor) else None
            yield text.format(path=f"{name}{keystr(keys)}", kind=type(leaf).__name__, layout=layout)


def _why_not_split(leaf: object, *, ready_made: bool) -> str | None:
    """Returns the template of the message for a leaf that cannot be split, else None."""
    match leaf:
        case Tensor() if leaf.is_nested:
            return NESTED_TENSOR
        case Tensor() if leaf.layout is not torch.strided and not ready_made:
            return SPARSE
        case MicroBatches() | Whole(MicroBatches()):
            return NESTED_MICRO_BATCHES
        case np.ndarray() | Whole(np.ndarray()):
            return NUMPY
        case Tensor() | Whole():
            return None
        case PackedSequence():
            return PACKED_SEQUENCE
        case DataLoader() | Dataset() | Iterator():
            return LOADER
    if hasattr(type(leaf), "__array__"):  # pandas, JAX and similar libraries
        return ARRAY
    return OBJECT_WITH_TENSORS if hides_tensors(leaf) else None
