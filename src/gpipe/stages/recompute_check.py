"""Compares a recompute with its forward: the bits that a stage made, and the leaves that its backward would reach.

Bits are compared by digests, so that neither is kept. Of a large tensor a digest holds sums of its 64-bit words, by
row and by column, in whole numbers: no bit of a word changes without its row, and words do not change places without
their rows or columns. Small tensors it holds whole.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gpipe._torch.autograd import PLAIN
from gpipe._torch.trees import tree_leaves
from gpipe.stages.boundary import BoundaryValue, leaves_of
from gpipe.stages.quantized import pieces_of
from gpipe.stages.tree import OPAQUE, Tree, local, tensors_in

if TYPE_CHECKING:
    from gpipe.stages.stage import Stage, StageOutput

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
    pieces = [piece for tensor in tensors if not is_lazy(tensor) for piece in pieces_of(local(tensor))]
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


DIFFERS = (
    "The recomputation of {layer} gave different values than its forward, so gradients would be wrong. The layer "
    "depends on state that has changed in between: random numbers of numpy or Python, a counter, the time, a value "
    "that another layer left on a module, or an attribute or weight that was changed before backward(). Draw with "
    "torch, keep state that changes in buffers (register_buffer), stash and pop values for other layers, or pass "
    "remat='never' for this stage."
)
WRITES_WEIGHTS = (
    "The recomputation of {layer} gave different values than its forward, so gradients would be wrong. Its forward "
    "writes the weights {names}, and the recomputation reads the written values. Pass remat='never' for this stage, "
    "or update these weights after pipe.step(...)."
)
LEFT = (
    "A layer left a tensor on a module ({left}), which may belong to a later micro-batch by now. Stash the tensor in "
    "the layer that makes it, and pop it where it is used."
)


class RecomputeError(RuntimeError):
    """A recompute gave other values than its forward."""


class Fingerprint(NamedTuple):
    """What a run of a stage made, and the leaves that a backward would reach."""

    digest: Digest
    reached: frozenset[int]

    @classmethod
    def of(cls, made: "StageOutput", *, outlives: bool = True) -> "Fingerprint":
        reached = frozenset(map(id, leaves_of(tensors_in(made.values))))
        return cls(digest([*made.values, *made.for_loss.values()], outlives=outlives), reached)

    def differs(self, made: "StageOutput", stage: "Stage", given: Sequence[BoundaryValue]) -> "bool | Tensor":
        """Whether another run made something else (see `differ`), or reached other weights of it, or inputs."""
        other = Fingerprint.of(made, outlives=False)
        if apart := self.reached ^ other.reached:  # layers may make other leaves anew
            own = {id(leaf) for crossing in given for leaf in crossing.leaves}
            if apart & own.union(*(map(id, layer.module.parameters()) for layer in stage.layers)):
                return True
        return differ(self.digest, other.digest)


def recompute_error(layer: str, left: str = "", written: Sequence[str] = ()) -> RecomputeError:
    """Returns the error for a recomputation that differs from its forward.

    Args:
        layer: A description of the layer.
        left: Tensors that layers left on modules.
        written: Names of weights that the forward of the layer writes.
    """
    if written:
        return RecomputeError(WRITES_WEIGHTS.format(layer=layer, names=", ".join(written)))
    error = RecomputeError(DIFFERS.format(layer=layer))
    if left:
        error.add_note(LEFT.format(left=left))
    return error


def tensors_left_on(stages: "Iterable[Stage]") -> str:
    """In words, the attributes of modules where forwards left tensors."""
    found = [
        f"{name} of {layer}"
        for stage in stages
        for layer in stage.layers
        for module in layer.module.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not (value.is_leaf and value.requires_grad)
    ]
    return ", ".join(dict.fromkeys(found))
