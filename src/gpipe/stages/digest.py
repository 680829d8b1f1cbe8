"""Compares values by digests, so that no copy of a large value is necessary.

The digest arranges the 64-bit words of a large tensor in rows and columns, and consists of the integer sum of each
row and each column. Changing one word changes the sum of its row. Moving a word changes a sum, unless the word stays
in its row and column. The digest of a small tensor is a copy.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gpipe._torch.autograd import PLAIN
from gpipe._torch.trees import tree_leaves
from gpipe.stages.dtensor import local_tensor
from gpipe.stages.quantized import pieces_of
from gpipe.stages.tree import OPAQUE, Tree

SMALL = 4096
"""Maximum size in bytes of tensors whose digest is a copy."""
COLUMNS = 512
"""The number of 64-bit words in a row."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype with which to compare elements bitwise, by their size in bytes."""


class Digest(NamedTuple):
    """A digest of a tree.

    Attributes:
        known: Properties that can be read without waiting for a device, such as dtypes, shapes and types.
        words: The sums and copies. A device may still be computing these tensors.
    """

    known: tuple[object, ...]
    words: list[Tensor]


def digest(values: Sequence[Tree], *, outlives: bool = True) -> Digest:
    """Returns the digest of some values.

    Args:
        values: Trees of tensors and other values.
        outlives: Whether the digest must stay valid if the values change in place. If not, the digest may share
            memory with the values.

    >>> values, same = torch.arange(6000.0), torch.arange(6000.0)
    >>> differ(digest([values]), digest([same])), differ(digest([values]), digest([same.roll(1)]))
    (False, True)
    """
    known: list[object] = []
    words: list[Tensor] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            known.append((leaf.requires_grad, leaf.dtype, leaf.shape))
            words += _words(leaf.data, copied=outlives)
        else:
            known.append(repr(leaf) if isinstance(leaf, OPAQUE) else type(leaf))
    return Digest(tuple(known), words)


def checksum(tensors: Iterable[Tensor]) -> int:
    """Returns a checksum of the bytes of tensors. Includes only local shards of DTensors, and skips lazy tensors."""
    pieces = [piece for tensor in tensors if not is_lazy(tensor) for piece in pieces_of(local_tensor(tensor))]
    words = digest([piece.detach() for piece in pieces]).words
    flat = (word.cpu().contiguous().view(-1).view(torch.uint8) for word in words)
    return zlib.crc32(b"".join(word.numpy().tobytes() for word in flat))


def differ(first: Digest, second: Digest) -> "bool | Tensor":
    """Returns whether two digests differ.

    For tensors on an accelerator, returns a Boolean tensor on the same device, because reading its value would wait
    for the device.
    """
    if first.known != second.known:
        return True
    differences = []
    for a, b in zip(first.words, second.words, strict=True):
        if a.device != b.device:  # The input of a step, and its copy on the device of the first stage.
            b = b.to(a.device)
        if not a.is_cpu:
            differences.append((a != b).any())
        elif not torch.equal(a, b):
            return True
    return torch.stack(differences).any() if differences else False


def _words(tensor: Tensor, *, copied: bool) -> list[Tensor]:
    """Returns the digest of a tensor. The list is empty if the tensor has no values, or is not plain and strided."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return []
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    size = tensor.nbytes
    if size <= SMALL and tensor.itemsize in INTEGERS:
        bits = tensor.view(INTEGERS[tensor.itemsize])
        return [bits.clone() if copied else bits]
    memory = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    if memory.data_ptr() % 8:
        memory = memory.clone()
    memory = memory.view(torch.uint8)
    rows = size // (8 * COLUMNS)
    table = memory[: rows * 8 * COLUMNS].view(torch.int64).view(rows, COLUMNS)
    return [table.sum(0), table.sum(1), memory[rows * 8 * COLUMNS :].clone()]
