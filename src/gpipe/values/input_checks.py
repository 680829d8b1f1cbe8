"""Finds what in inputs and targets cannot be split by rows into micro-batches, and says what to give instead."""

from collections.abc import Iterator, Mapping
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from gpipe.torch_private.trees import keystr, tree_flatten_with_path
from gpipe.values.hidden_tensors import hides_tensors
from gpipe.values.microbatch import MicroBatches, Whole, as_tree
from gpipe.values.tree import Tree

SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Generator)


INSIDE = (
    "gpipe.MicroBatches, which stand for all inputs or all targets and in no other value; put the other values into "
    "each micro-batch: gpipe.MicroBatches([(x, mask), ...])"
)


def find_unsplittable(what: str, tree: Tree) -> Iterator[str]:
    """What is in a tree that cannot be split into micro-batches, or be one of them, each with what to do.

    >>> list(find_unsplittable("inputs", {"mask": np.ones(3)}))
    ["inputs['mask'] is a numpy array; give a tensor: torch.from_numpy(...)"]
    """
    if type(tree) is Tensor and tree.layout is torch.strided and not tree.is_nested:
        return
    for path, leaf in tree_flatten_with_path(as_tree(tree), is_leaf=_is_packed)[0]:
        name = f"{what}{keystr(path)}"
        if isinstance(leaf, Tensor):
            yield from _find_strange_layout(name, leaf, ready_made=isinstance(tree, MicroBatches))
        elif isinstance(leaf, MicroBatches):
            yield f"{name} is {INSIDE}"
        elif isinstance(leaf, Whole):
            if isinstance(leaf.tensor, np.ndarray):
                yield f"{name} is a numpy array in gpipe.Whole; give a tensor: torch.from_numpy(...)"
            elif isinstance(leaf.tensor, MicroBatches):
                yield f"{name} is gpipe.Whole with {INSIDE}"
        elif not isinstance(leaf, SIMPLE):
            yield from _find_strange_kind(name, leaf)


def find_unsplit_lists(what: str, tree: Tree, rows: int) -> Iterator[str]:
    """Lists of numbers or words, one a row as it seems, that would go whole to every micro-batch."""
    if type(tree) is Tensor or rows < 2:
        return
    for path, leaf in tree_flatten_with_path(tree, is_leaf=_is_plain_list)[0]:
        if _is_plain_list(leaf) and len(leaf) == rows:
            yield (
                f"{what}{keystr(path)} is a list of {rows} values, as many as the mini-batch has rows, and "
                f"only tensors are split by rows; make it a tensor, torch.tensor(...), or wrap it in gpipe.Whole if "
                f"every micro-batch needs all of it"
            )


def _is_plain_list(value: object) -> TypeGuard[list[object]]:
    return type(value) is list and all(isinstance(item, (int, float, str, bytes)) for item in value)


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)


def _find_strange_layout(name: str, tensor: Tensor, *, ready_made: bool) -> Iterator[str]:
    if tensor.is_nested:
        yield (
            f"{name} is a nested tensor, which has no rows to split; pad it, as in "
            f"torch.nested.to_padded_tensor(t, 0.0), and give a mask beside it"
        )
    elif tensor.layout is not torch.strided and not ready_made:
        yield f"{name} is sparse ({tensor.layout}), which cannot be split into micro-batches; give t.to_dense()"


def _find_strange_kind(name: str, leaf: object) -> Iterator[str]:
    kind = type(leaf)
    library = kind.__module__.partition(".")[0]
    if isinstance(leaf, np.ndarray):
        yield f"{name} is a numpy array; give a tensor: torch.from_numpy(...)"
    elif library in ("pandas", "polars"):
        yield f"{name} is a {kind.__name__} of {library}; give a tensor: torch.from_numpy(t.to_numpy())"
    elif isinstance(leaf, PackedSequence):
        yield f"{name} is a PackedSequence; give it padded, by nn.utils.rnn.pad_packed_sequence, and the lengths"
    elif isinstance(leaf, (DataLoader, Dataset, Iterator)):
        yield (
            f"{name} is a {kind.__name__}; give one mini-batch of it at a time: "
            f"for inputs, targets in ...: pipe.step(inputs, targets, loss_fn)"
        )
    elif hasattr(leaf, "__array__") and not isinstance(leaf, np.generic):
        yield f"{name} is a {kind.__name__}; give a tensor: torch.as_tensor(numpy.asarray(...))"
    elif hides_tensors(leaf):
        plain = " dict(...) of it," if isinstance(leaf, Mapping) else ""
        yield (
            f"{name} is a {kind.__name__} that holds tensors, which cannot be seen, and so not be split; "
            f"give{plain} tensors in tuples, lists or dicts, register the class by "
            f"torch.utils._pytree.register_pytree_node, or wrap it in gpipe.Whole if every micro-batch needs it whole"
        )
