"""Digests of values, which are compared in place of the values.

The digest of a large tensor has sums of its 64-bit words, by row and by column, in whole numbers: no bit of a word
changes without its row, and words do not change places without their rows or columns. Small tensors are kept whole.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gpipe._torch.autograd import PLAIN
from gpipe._torch.trees import tree_leaves
from gpipe.stages.dtensor import local_tensor
from gpipe.stages.quantized import pieces_of
from gpipe.stages.tree import OPAQUE, Tree

if TYPE_CHECKING:
    pass

SMALL = 4096  # bytes up to which a tensor is held whole
COLUMNS = 512  # words in a row
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, as what its bits are compared."""


class Digest(NamedTuple):
    """A digest of a value: what is known of it at once, and words that its device may still be busy with."""

    known: tuple[object, ...]
    words: list[Tensor]


def digest(values: Sequence[Tree], *, outlives: bool = True) -> Digest:
    """The digest of values. One that does not outlive them may have their own memory, and is compared at once.

    >>> one, other = torch.arange(6000.0), torch.arange(6000.0)
    >>> differ(digest([one]), digest([other])), differ(digest([one]), digest([other.roll(1)]))
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
    """A checksum of the bits of tensors, as far as they are on this process; lazy ones have none."""
    pieces = [piece for tensor in tensors if not is_lazy(tensor) for piece in pieces_of(local_tensor(tensor))]
    words = digest([piece.detach() for piece in pieces]).words
    flat = (word.cpu().contiguous().view(-1).view(torch.uint8) for word in words)
    return zlib.crc32(b"".join(word.numpy().tobytes() for word in flat))


def differ(one: Digest, other: Digest) -> "bool | Tensor":
    """Whether two digests differ; for tensors on a GPU, a tensor there that will say it: to look would halt it."""
    if one.known != other.known:
        return True
    doubts = []
    for a, b in zip(one.words, other.words, strict=True):
        if a.device != b.device:  # the input of a step, and its copy on the device of the first stage
            b = b.to(a.device)
        if not a.is_cpu:
            doubts.append((a != b).any())
        elif not torch.equal(a, b):
            return True
    return torch.stack(doubts).any() if doubts else False


def _words(tensor: Tensor, *, copied: bool) -> list[Tensor]:
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
