"""Messages as bytes: a layout that says what there is, and the bytes of the tensors behind it. No pickle.

A tensor arrives as it lay when it left (layout.py), because the bits of what is computed from it depend on that. A
layout is written and read once for as long as shapes stay the same: both ends keep those that they have seen.
"""

import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gpipe._torch.trees import TreeSpec, tree_flatten, tree_unflatten
from gpipe.distributed.tree_text import At, read_dtype, read_leaf, read_tree, write_leaf, write_tree
from gpipe.distributed.untrusted import Damaged, check_shape, reading, why_too_wide
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.layout import alignment, allocate
from gpipe.stages.messages import Message, Payload

APART = 64  # bytes: where in a message tensors begin
KEPT = 1024  # layouts
NOT_DENSE = (
    "a {name} of layout {layout} cannot go to another process; return a dense torch.Tensor (of a DTensor, its "
    "full_tensor() or to_local())"
)
NUMPY = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool})

Buffer: TypeAlias = bytearray | mmap.mmap
Shape: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bool, int]
"""What is known of a tensor before it comes: dtype, size, strides, whether it requires a gradient, alignment."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor's elements are in a message, and how they lie in memory.

    `size` leaves out what is only repeated: dimensions of stride 0 have size 1, and are expanded at the end.
    `dense` elements travel in the order of memory, others in the order of their indices. `units` are what torch reads
    them as, and how many.
    """

    shape: Shape
    start: int
    end: int
    units: tuple[torch.dtype, int]
    size: tuple[int, ...]
    strides: tuple[int, ...]
    dense: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """What a message holds: a tree, or None for a list of gradients; its leaves; and an extent for each tensor."""

    spec: TreeSpec | None
    leaves: tuple[object, ...]
    extents: tuple[Extent, ...]


class Encoded(NamedTuple):
    """A message as it is sent: its layout in bytes, and its tensors, each with the extent where it is put."""

    layout: bytes
    extents: tuple[Extent, ...]
    size: int  # bytes that the tensors take, with what aligns them
    tensors: list[Tensor]

    def write(self, memory: Tensor) -> None:
        """Puts the tensors into `size` bytes."""
        with torch.no_grad():
            for tensor, extent in zip(self.tensors, self.extents, strict=True):
                if extent.end > extent.start:
                    memory[extent.start : extent.end].view(tensor.dtype).copy_(flat(tensor, extent))

    def pieces(self) -> list[bytearray | memoryview]:
        """The `size` bytes, one after another."""
        if len(self.tensors) == 1 and self.tensors[0].dtype in NUMPY and self.tensors[0].is_contiguous():
            return [self.tensors[0].numpy(force=True).data]  # no copy
        memory = bytearray(self.size)
        if memory:
            self.write(torch.frombuffer(memory, dtype=torch.uint8))
        return [memory]


def encode(message: Message) -> Encoded:
    """What is sent of a message; a TypeError says what in it cannot go to another process."""
    if isinstance(message, BoundaryValue):
        items, spec = tree_flatten(message.value)
        tree = write_tree(spec)
    else:
        items, tree = message, None
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []
    leaves: list[object] = []
    for item in items:
        if not isinstance(item, Tensor):
            leaves.append(write_leaf(item))
            continue
        if id(item) not in numbers:
            if tree is not None:
                _refuse_attributes(item)
            numbers[id(item)] = len(tensors)
            tensors.append(item)
        leaves.append(["tensor", numbers[id(item)]])
    shapes = tuple(map(shape_of, tensors))
    extents = extents_of(shapes)
    named = [[str(dtype).removeprefix("torch."), *others] for dtype, *others in shapes]
    return Encoded(json.dumps([tree, leaves, named]).encode(), extents, _end_of(extents), tensors)


def payload_of(message: Message) -> tuple[Payload, ...]:
    """What tensors a message carries, each once, with the bytes that travel; the same at both ends.

    >>> payload_of([torch.ones(2, 3), None, torch.ones(1).expand(4)])
    (Payload(dtype='float32', shape=(2, 3), size=24), Payload(dtype='float32', shape=(4,), size=4))
    """
    items = tree_flatten(message.value)[0] if isinstance(message, BoundaryValue) else message
    tensors = {id(item): item for item in items if isinstance(item, Tensor)}.values()
    return tuple(_payload(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors)


@lru_cache(KEPT)
def _payload(dtype: torch.dtype, size: torch.Size, strides: tuple[int, ...]) -> Payload:
    (extent,) = extents_of(((dtype, tuple(size), strides, False, APART),))
    return Payload(str(dtype).removeprefix("torch."), tuple(size), extent.end)


def _end_of(extents: Sequence[Extent]) -> int:
    return extents[-1].end if extents else 0


def _refuse_attributes(tensor: Tensor) -> None:
    if vars(tensor):
        raise TypeError(
            f"a tensor with attributes of somebody's own ({', '.join(vars(tensor))}) cannot go to another process "
            f"with them; return a tuple or a dict of the tensor and of what it is to carry"
        )


def decode(layout: bytes, memory: Buffer, offset: int = 0, *, size: int | None = None) -> Message:
    """The message of a layout and the bytes behind it, which may be used again afterwards.

    `size` is how many bytes its tensors are said to take.

    Raises:
        Damaged: Nothing writes that.
    """
    read = _read(layout)
    needed = _end_of(read.extents)
    if offset + needed > len(memory) or size not in (None, needed):
        raise Damaged(f"tensors of {needed} bytes, in a message of {len(memory) - offset if size is None else size}")
    tensors = [_take(extent, memory, offset) for extent in read.extents]
    items: list[Any] = [tensors[leaf.number] if isinstance(leaf, At) else leaf for leaf in read.leaves]
    if read.spec is None:
        return items
    value = tree_unflatten(items, read.spec)
    return BoundaryValue(value, [tensor for tensor in tensors if tensor.requires_grad])


def shape_of(tensor: Tensor) -> Shape:
    """What is told of a tensor before it comes; one that is not dense, or more than a tensor, is refused."""
    if tensor.layout != torch.strided or type(tensor) is not Tensor:
        raise TypeError(NOT_DENSE.format(name=type(tensor).__name__, layout=tensor.layout))
    if tensor.is_quantized:
        raise TypeError("a quantized tensor cannot go to another process; return its .dequantize()")
    if too_wide := why_too_wide(tensor.dtype, tuple(tensor.shape), tensor.stride()):
        raise TypeError(too_wide)
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, alignment(tensor)


@lru_cache(KEPT)
def extents_of(shapes: tuple[Shape, ...]) -> tuple[Extent, ...]:
    """Where tensors of these shapes are in a message."""
    extents: list[Extent] = []
    at = 0
    for shape in shapes:
        dtype, size, strides, wants_gradient, aligned = shape
        start = -(-at // APART) * APART
        own = tuple(1 if stride == 0 and n else n for n, stride in zip(size, strides, strict=True))
        ranked = sorted((stride, n) for n, stride in zip(own, strides, strict=True) if n != 1)
        dense = apart = True
        reach = 1  # elements up to the end of what was looked at
        for stride, n in ranked:
            dense, apart = dense and stride == reach, apart and stride >= reach
            reach = stride * (n - 1) + reach
        count = torch.Size(own).numel()
        if not apart and count:  # elements that overlap in another way
            own, strides, dense = size, _contiguous(size), True
            shape = (dtype, size, strides, wants_gradient, aligned)
            count = torch.Size(own).numel()
        at = start + count * dtype.itemsize
        wide = dtype.itemsize > 8  # torch reads complex128 from aligned addresses alone, or dies
        units = (torch.uint8, at - start) if wide else (dtype, count)
        extents.append(Extent(shape, start, at, units, own, strides, dense))
    return tuple(extents)


def flat(tensor: Tensor, extent: Extent) -> Tensor:
    """The elements of a tensor in one dimension, as they travel."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        for axis, count in enumerate(extent.size):  # without repetitions, which the copy would write out
            tensor = tensor.narrow(axis, 0, count)
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1)
    count = (extent.end - extent.start) // tensor.element_size()
    if tensor.stride() != extent.strides:  # resolved just now, or overlapping
        if not extent.dense or extent.strides == _contiguous(extent.size):
            return tensor.expand(extent.size).contiguous().view(-1)
        tensor = torch.empty_strided(extent.size, extent.strides, dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
    if extent.dense:
        return tensor.as_strided((count,), (1,))
    return tensor.as_strided(extent.size, extent.strides).contiguous().view(-1)


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


def _take(extent: Extent, memory: Buffer, offset: int) -> Tensor:
    dtype = extent.shape[0]
    if extent.end == extent.start:
        return lay(torch.empty(0, dtype=dtype, device="cpu"), extent)
    unit, count = extent.units
    found = torch.frombuffer(memory, dtype=unit, count=count, offset=offset + extent.start).clone()
    return lay(found if unit is dtype else found.view(dtype), extent)


def lay(elements: Tensor, extent: Extent) -> Tensor:
    """The tensor of these elements, laid as it left: in their own memory if it can be."""
    dtype, size, strides, wants_gradient, aligned = extent.shape
    if not elements.numel():
        tensor = torch.empty_strided(size, strides, dtype=dtype, device=elements.device)
    else:
        if not extent.dense or aligned != alignment(elements):
            found = elements.as_strided(extent.size, extent.strides) if extent.dense else elements.view(extent.size)
            elements = allocate(dtype, extent.size, extent.strides, aligned, elements.device).copy_(found)
        tensor = elements.as_strided(size, strides)
    return tensor.requires_grad_() if wants_gradient else tensor


@lru_cache(KEPT)
def _read(layout: bytes) -> Layout:
    with reading("a layout"):
        spec, leaves, named = json.loads(layout.decode())  # of bytes it would guess the encoding
        shapes = tuple(
            (read_dtype(dtype), tuple(size), tuple(strides), wants, aligned)
            for dtype, size, strides, wants, aligned in named
        )
        for shape in shapes:
            check_shape(*shape)
        tree = None if spec is None else read_tree(spec)
        read = Layout(tree, tuple(map(read_leaf, leaves)), extents_of(shapes))
        _check_whole(read)
        return read


def _check_whole(read: Layout) -> None:
    """Checks that all tensors that are named are there."""
    numbers = {leaf.number for leaf in read.leaves if isinstance(leaf, At)}
    if numbers != set(range(len(read.extents))):
        raise ValueError(f"tensors {sorted(numbers)} of {len(read.extents)}")
    if read.spec is not None and read.spec.num_leaves != len(read.leaves):
        raise ValueError(f"{read.spec.num_leaves} leaves")
