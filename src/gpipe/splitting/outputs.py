"""Puts what a model returned for each micro-batch together to what it returns for the mini-batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe.splitting.own_loss import own_loss
from gpipe.torch_private.trees import keystr, tree_flatten_with_path, tree_unflatten
from gpipe.values.tree import Tree

CANNOT_JOIN = (
    "the model's outputs for the micro-batches cannot be put together: output{path} {why}. Give the "
    "micro-batches as gpipe.MicroBatches([...]), for a list of their outputs, or use step(), which needs the "
    "loss alone"
)
UNKNOWN_LOSS = "is a loss, and it is not known how it averages (leave out the labels, for all but the loss)"


def join(outputs: Sequence[Tree], rows: Sequence[int], shares: Sequence[float]) -> Tree:
    """The output of the mini-batch: rows behind one another, losses added up by their shares.

    Raises:
        TypeError: Something is neither the loss, nor has rows, nor is the same for all.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten_with_path(output) for output in outputs]
    losses = [_loss_in(output) for output in outputs]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise TypeError(CANNOT_JOIN.format(path="", why="has other parts for one micro-batch than for another"))
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_join_leaf(column, losses, rows, shares) for column in columns], spec)


def _loss_in(output: Tree) -> Tensor | None:
    try:
        return own_loss(output)
    except TypeError:
        return None


def _join_leaf(
    column: Sequence[tuple[Any, Any]], losses: Sequence[Tensor | None], rows: Sequence[int], shares: Sequence[float]
) -> Any:
    path, leaves = keystr(column[0][0]), [leaf for _, leaf in column]
    first = leaves[0]
    if all(leaf is loss for leaf, loss in zip(leaves, losses, strict=True)) and first is not None:
        if len(shares) != len(leaves):
            raise TypeError(CANNOT_JOIN.format(path=path, why=UNKNOWN_LOSS))
        said = [loss * share for loss, share in zip(leaves, shares, strict=True) if share]  # of no weight, even NaN
        return sum(said[1:], start=said[0])
    if isinstance(first, Tensor):
        if first.dim() and all(leaf.dim() and len(leaf) == count for leaf, count in zip(leaves, rows, strict=True)):
            if any(leaf.shape[1:] != first.shape[1:] for leaf in leaves):
                shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
                raise TypeError(CANNOT_JOIN.format(path=path, why=f"has the shapes {shapes}"))
            return torch.cat(leaves)
        if all(leaf.shape == first.shape and torch.equal(leaf, first) for leaf in leaves):
            return first
        raise TypeError(CANNOT_JOIN.format(path=path, why=f"has no rows: its shape is {tuple(first.shape)}"))
    if any(leaf is not first and leaf != first for leaf in leaves):
        raise TypeError(CANNOT_JOIN.format(path=path, why=f"is {first!r} for one and another for others"))
    return first
