"""Splits a mini-batch into micro-batches, merges their outputs, and weighs uneven ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gpipe.torch_private.trees import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten
from gpipe.values.tree import Tree

Reduction: TypeAlias = Literal["mean", "sum"] | Callable[[Tree], object]


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor, or what else holds some, that every micro-batch takes whole, whatever the first dimension.

    >>> import gpipe, torch
    >>> pipe = gpipe.GPipe([torch.nn.Identity()], partitions=1, micro_batches=2)
    >>> cosines = gpipe.Whole(torch.zeros(1, 8))  # not split, though the batch has 4 rows
    >>> out, _ = pipe((torch.ones(4, 8), cosines))
    >>> out.shape
    torch.Size([4, 8])
    """

    tensor: Tensor


def count_rows(inputs: Tree) -> int:
    """N, the rows of a mini-batch: the first dimension of its first tensor that has one.

    Raises:
        ValueError: There is no such tensor, or it has no rows.
    """
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            if leaf.shape[0] == 0:
                raise ValueError(
                    f"the mini-batch is empty: its first tensor has shape {tuple(leaf.shape)}; skip this batch"
                )
            return int(leaf.shape[0])
    raise ValueError(
        f"the inputs hold no tensor with rows; give at least one tensor whose first dimension is the batch, "
        f"{_no_rows_in(inputs)}"
    )


def _no_rows_in(inputs: Tree) -> str:
    leaves = tree_leaves(inputs)
    if leaves and all(isinstance(leaf, (int, float)) for leaf in leaves):
        return f"not numbers in a {type(inputs).__name__}: torch.tensor(...) makes one of them"
    if isinstance(inputs, (dict, list, tuple)) and not leaves:
        return f"not an empty {type(inputs).__name__}"
    return f"not {'None' if inputs is None else 'a ' + type(inputs).__name__} without one"


def split(tree: Tree, rows: int, parts: int, what: str) -> list[Tree]:
    """Splits each tensor of `rows` rows as `tensor_split` does: the first parts are one row larger.

    Tensors without dimensions, other values and what is wrapped in `Whole` go to every part as they are.

    Raises:
        ValueError: Tensors with another first dimension, all of them named.
    """
    if type(tree) is Tensor and tree.dim() > 0 and tree.shape[0] == rows:
        return list(tree.tensor_split(parts))
    leaves, spec = tree_flatten_with_path(tree)
    mistakes = [
        f"{what}{keystr(path)} has shape {tuple(leaf.shape)}, but the mini-batch has {rows} rows; "
        f"split by rows, or wrap it in gpipe.Whole if every micro-batch needs all of it"
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] != rows
    ]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    columns = [_split_leaf(leaf, parts) for _, leaf in leaves]
    return [tree_unflatten([column[i] for column in columns], spec) for i in range(parts)]


def _split_leaf(leaf: object, parts: int) -> Sequence[object]:
    if isinstance(leaf, Whole):
        return [leaf.tensor] * parts
    if isinstance(leaf, Tensor) and leaf.dim() > 0:
        return leaf.tensor_split(parts)
    return [leaf] * parts


def merge(parts: Sequence[Tree]) -> Tree:
    """Puts the outputs of micro-batches together again, tensors along their first dimension."""
    if type(parts[0]) is Tensor and parts[0].dim() > 0:
        return parts[0] if len(parts) == 1 else torch.cat(parts)  # type: ignore[arg-type]  # a tensor each
    flat = [tree_flatten(part) for part in parts]
    if any(spec != flat[0][1] for _, spec in flat):
        raise TypeError("the outputs of the micro-batches differ in structure; return the same structure for each")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_merge_leaf(column) for column in columns], flat[0][1])


def _merge_leaf(column: Sequence[object]) -> object:
    first = column[0]
    if len(column) == 1:
        return first
    if isinstance(first, Tensor):
        if first.dim() == 0:
            raise TypeError(
                "an output is a tensor without dimensions, one for each micro-batch, and cannot be merged; "
                "give it a row dimension, or use step(), where loss_fn sees each micro-batch's output"
            )
        return torch.cat([leaf for leaf in column if isinstance(leaf, Tensor)])
    if any(other is not first and other != first for other in column):
        raise TypeError(
            f"an output is {first!r} for one micro-batch and differs for another; return tensors with rows"
        )
    return first


def rows_of_parts(rows: int, parts: int) -> list[int]:
    """The rows of each micro-batch, where a mini-batch has so many: the first ones have one more."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def loss_weights(
    reduction: Reduction,
    rows: Sequence[int],
    targets: Sequence[Tree],
    over_replicas: Callable[[float], float] = float,
) -> list[float]:
    """The share w_i of each micro-batch in the loss: 1 each for "sum", else in proportion, in float64.

    `over_replicas` adds the weight of this mini-batch to that of the others.

    Raises:
        ValueError: A weight is negative or not finite, or all are 0.
        TypeError: The reduction is none of those known.
    """
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
