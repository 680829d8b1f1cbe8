"""What one call of a pipe is given, checked and cut into micro-batches."""

from collections.abc import Callable
from typing import NamedTuple

from gpipe.run.ambient import Ambient
from gpipe.run.boundary import tensors_in
from gpipe.run.microbatch import Reduction, Tree, count_rows, rows_of_parts, split


class Given(NamedTuple):
    """What one call of `step` is given, and the modes of the caller."""

    inputs: Tree
    targets: Tree
    loss_fn: Callable[..., object]
    reduction: Reduction
    scale: float
    ambient: Ambient


def split_alike(micro_batches: int, **trees: Tree) -> tuple[list[int], list[list[Tree]]]:
    """Cuts trees of as many rows as the `inputs` among them, by name; gives the rows of each part, and the parts.

    There are at most `micro_batches` parts, and none is empty.

    Raises:
        ValueError: There are no rows, or not as many everywhere; names all that is wrong.

    >>> import torch
    >>> rows, ((first, *_), targets) = split_alike(2, inputs=torch.zeros(5, 4), targets=torch.zeros(5))
    >>> rows, first.shape, len(targets)
    ([3, 2], torch.Size([3, 4]), 2)
    """
    rows = count_rows(trees["inputs"])
    parts = min(micro_batches, rows)
    found, mistakes = [], []
    for what, tree in trees.items():
        try:
            found.append(split(tree, rows, parts, what))
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return rows_of_parts(rows, parts), found


def refuse_gradients_of_inputs(inputs: Tree) -> None:
    """Refuses inputs of a step that would wait for gradients.

    Raises:
        ValueError: One requires a gradient.
    """
    if any(tensor.requires_grad for tensor in tensors_in(inputs)):
        raise ValueError(
            "an input requires a gradient, and step() gives none to its inputs; "
            "use loss_fn(pipe(inputs), targets).backward(), or detach the input"
        )
