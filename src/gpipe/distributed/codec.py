"""Messages as bytes: a layout that says what there is, and the bytes of the tensors behind it. No pickle.

A tensor keeps its memory layout (stages/memory_layout.py), since the bits of what comes of it depend on that. A
layout is read once for as long as shapes stay the same: both ends keep those that they have seen.

What is no tensor is text, which names no class, module or attribute that the other end would look up by itself: only
kinds of the tables below, and, by the name under which they were registered with torch's pytrees *in that process*,
classes of the user.
"""

import json
import math
import mmap
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpipe._torch.trees import TreeSpec, registered_class, registration, tree_flatten, tree_unflatten
from gpipe.errors import RemoteError, received
from gpipe.stages.boundary import UNDEFINED, BoundaryValue, Undefined
from gpipe.stages.memory_layout import LARGEST_UNIT, alignment, allocate
from gpipe.stages.messages import Message
from gpipe.stages.traffic import Payload

ALIGNED_BYTES = 64  # bytes: where in a message tensors begin
CACHED_LAYOUTS = 1024  # layouts
LARGE_BYTES = 2**21  # of a tensor that gets pages of its own
MOST_PIECES = 2**9  # that the system takes at once: not quite 2**10
MOST_DIMENSIONS = 64  # torch's kernels take no more
SPARE_BYTES, REACH_PER_BYTE = 2**30, 2**16
"""Bytes that a tensor may reach over, and how many for each byte of it besides: a column of a wide matrix."""
DEEPEST_TREE = 100  # containers around a leaf
DTYPES = {
    str(found).removeprefix("torch."): found for found in vars(torch).values() if isinstance(found, torch.dtype)
}
CONTAINERS = {kind.__name__: kind for kind in (tuple, list, dict, OrderedDict, torch.Size, deque, defaultdict)}
FACTORIES = {kind.__name__: kind for kind in (list, dict, tuple, set, int, float, str)}
"""What a defaultdict may make; a message may name nothing but this, those and classes that are registered."""
LEAF = tree_flatten(0)[1]
ADVICE = (
    "return tensors, numbers, strings, None, or tuples, lists and dicts of them, or register the class with "
    "torch.utils._pytree under a serialized_type_name, in every process"
)

Buffer: TypeAlias = bytearray | mmap.mmap
Shape: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bool, int]
"""What is known of a tensor before it comes: dtype, size, strides, whether it requires a gradient, alignment."""


class Gone(ConnectionError):  # noqa: N818 it is a state, and caught where it arises
    """The process at the other end has ended, or cannot be reached any more."""


class Damaged(ValueError):  # noqa: N818 a state of the message
    """What came is nothing that gpipe sends."""


def damaged(peer: int, error: object) -> RemoteError:
    """What to raise where a process sent what cannot be."""
    return received(f"rank {peer} sent what gpipe never sends: {error}", peer)


@contextmanager
def reading(what: str, peer: int | None = None) -> Iterator[None]:
    """While something is read that may be damaged; if it is known whose it is, a RemoteError says so."""
    try:
        yield
    except (ValueError, TypeError, LookupError, RuntimeError, RecursionError, OverflowError, AttributeError) as error:
        said = f"{what} that gpipe does not send: {type(error).__name__}: {str(error)[:300]}"
        found = error if isinstance(error, Damaged) else Damaged(said)
        raise (found if peer is None else damaged(peer, found)) from error


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor's elements are in a message, and how they lie in memory.

    `size` leaves out what is only repeated: dimensions of stride 0 have size 1, and are expanded at the end.
    `dense` elements travel in the order of memory, others in the order of their indices.
    """

    shape: Shape
    start: int
    end: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    dense: bool


@dataclass(frozen=True, slots=True)
class At:
    """Where a tensor belongs among the leaves of a message: its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What a message holds: a tree, or None for a list of gradients; its leaves; and an extent for each tensor."""

    spec: TreeSpec | None
    leaves: Sequence[object]
    extents: tuple[Extent, ...]
    sharing: frozenset[int]  # see `BoundaryValue`

    @property
    def size(self) -> int:
        return self.extents[-1].end if self.extents else 0


class Encoded(NamedTuple):
    """A message as it is sent: its layout in bytes, and its tensors, each with the extent where it is put."""

    layout: bytes
    extents: tuple[Extent, ...]
    size: int  # bytes that the tensors take, with what aligns them
    tensors: list[Tensor]

    def write(self, memory: Tensor) -> None:
        with torch.no_grad():
            for tensor, extent in zip(self.tensors, self.extents, strict=True):
                if extent.end > extent.start:
                    memory[extent.start : extent.end].view(tensor.dtype).copy_(flat(tensor, extent))

    def pieces(self) -> list[memoryview]:
        """The `size` bytes, one after another: mostly the memory of the tensors itself."""
        found, at = [], 0
        for tensor, extent in zip(self.tensors, self.extents, strict=True):
            if extent.start > at:
                found.append(memoryview(bytes(extent.start - at)))
            found.append(flat(tensor, extent).cpu().view(torch.uint8).numpy().data)
            at = extent.end
        return found if len(found) < MOST_PIECES else [memoryview(b"".join(found))]


def encode(message: Message) -> Encoded:
    """What is sent of a message; a TypeError says what in it cannot go to another process."""
    numbered: dict[int, tuple[int, Tensor]] = {}
    if isinstance(message, BoundaryValue):
        is_value, written, sharing = True, _write(message.value, numbered), sorted(message.sharing)
    else:
        is_value, written, sharing = False, [_write(item, numbered) for item in message], []
    tensors = [tensor for _, tensor in numbered.values()]
    shapes = [(_name(dtype), *others) for dtype, *others in map(shape_of, tensors)]
    for tensor in tensors if is_value else ():
        if attributes := vars(tensor):
            raise TypeError(
                f"a tensor with attributes of somebody's own ({', '.join(attributes)}) cannot go to another process "
                f"with them; return a tuple or a dict of the tensor and of what it is to carry"
            )
    text = json.dumps([is_value, written, shapes, sharing]).encode()
    try:
        layout = _read(text)  # as the other end will
    except Damaged as error:
        raise TypeError(f"this cannot go to another process: {error}; {ADVICE}") from error
    return Encoded(text, layout.extents, layout.size, tensors)


def payload_of(message: Message) -> tuple[Payload, ...]:
    """What tensors a message carries, each once, with the bytes that travel; the same at both ends.

    >>> payload_of([torch.ones(2, 3), None, torch.ones(1).expand(4)])
    (Payload(dtype='float32', shape=(2, 3), size=24), Payload(dtype='float32', shape=(4,), size=4))
    """
    items = tree_flatten(message.value)[0] if isinstance(message, BoundaryValue) else message
    tensors = {id(item): item for item in items if isinstance(item, Tensor)}.values()
    return tuple(Payload(_name(t.dtype), tuple(t.shape), extents_of((shape_of(t),))[0].end) for t in tensors)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decode(layout: bytes, memory: Buffer, offset: int = 0, *, size: int | None = None) -> Message:
    """The message of a layout and a copy of the bytes behind it, which are said to be `size`; or raises `Damaged`."""
    read = _read(layout)
    if offset + read.size > len(memory) or size not in (None, read.size):
        raise Damaged(f"tensors of {read.size} bytes, in a message of {size or len(memory) - offset}")
    return assemble(layout, [_copy(extent, memory, offset) for extent in read.extents])


def elements(layout: bytes, size: int, fill: Callable[[memoryview], None]) -> list[Tensor]:
    """The bytes of each tensor of a message, in memory of its own; `fill` is given all `size` bytes to fill in turn.

    There is no memory for the next before one is full.
    """
    read, found, at = _read(layout), list[Tensor](), 0
    if read.size != size:
        raise Damaged(f"tensors of {read.size} bytes, in a message of {size}")
    for extent in read.extents:
        fill(memoryview(bytearray(extent.start - at)))
        found.append(room(extent.end - extent.start))
        fill(found[-1].numpy().data)
        at = extent.end
    return found


def room(size: int) -> Tensor:
    """Memory of so many bytes to be written to, of which much costs nothing until it is.

    To be given fresh pages takes longer than a fast network: 32 ms for 64 MiB, 2 ms where they may be of 2 MiB. So
    two memories that nobody uses any more are kept.
    """
    if size < LARGE_BYTES:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    fitting = [spare for spare in [*_spare] if size <= len(spare) <= 2 * size]
    try:
        memory = fitting[0]
        _spare.remove(memory)  # unless another thread has just done so
    except (IndexError, ValueError):
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"there is no memory for {size} bytes that travel between processes") from error
        with suppress(OSError, AttributeError):  # no such pages here
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8, size)
    weakref.finalize(array, _spare.append, memory).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


_spare: deque[mmap.mmap] = deque(maxlen=2)


def assemble(layout: bytes, elements: Sequence[Tensor]) -> Message:
    """The message of a layout and the `elements` of its tensors."""
    read = _read(layout)
    # as bytes: torch reads complex128 from aligned addresses alone, or dies
    tensors = [lay(one.view(extent.shape[0]), extent) for one, extent in zip(elements, read.extents, strict=True)]
    items: list[Any] = [tensors[leaf.number] if isinstance(leaf, At) else leaf for leaf in read.leaves]
    if read.spec is None:
        return items
    value = tree_unflatten(items, read.spec)
    return BoundaryValue(value, [tensor for tensor in tensors if tensor.requires_grad], sharing=read.sharing)


def shape_of(tensor: Tensor) -> Shape:
    """What is known of a tensor before it comes; one that is not dense, or more than a tensor, is refused."""
    if tensor.layout != torch.strided or type(tensor) is not Tensor:
        raise TypeError(
            f"a {type(tensor).__name__} of layout {tensor.layout} cannot go to another process; return a dense "
            f"torch.Tensor (of a DTensor, its full_tensor() or to_local())"
        )
    if tensor.is_quantized:
        raise TypeError("a quantized tensor cannot go to another process; return its .dequantize()")
    if too_wide := _why_too_wide(tensor.dtype, tuple(tensor.shape), tensor.stride()):
        raise TypeError(too_wide)
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, alignment(tensor)


@lru_cache(CACHED_LAYOUTS)
def extents_of(shapes: tuple[Shape, ...]) -> tuple[Extent, ...]:
    """Where tensors of these shapes are in a message."""
    extents: list[Extent] = []
    at = 0
    for shape in shapes:
        dtype, size, strides, wants_gradient, aligned = shape
        start = -(-at // ALIGNED_BYTES) * ALIGNED_BYTES
        own = tuple(1 if stride == 0 and n else n for n, stride in zip(size, strides, strict=True))
        ranked = sorted((stride, n) for n, stride in zip(own, strides, strict=True) if n != 1)
        dense = apart = True
        reach = 1  # elements up to the end of what was looked at
        for stride, n in ranked:
            dense, apart = dense and stride == reach, apart and stride >= reach
            reach = stride * (n - 1) + reach
        if not apart and 0 not in size:  # elements that overlap in another way
            own, strides, dense = size, _contiguous(size), True
            shape = (dtype, size, strides, wants_gradient, aligned)
        at = start + math.prod(own) * dtype.itemsize
        extents.append(Extent(shape, start, at, own, strides, dense))
    return tuple(extents)


def flat(tensor: Tensor, extent: Extent) -> Tensor:
    """The elements of a tensor in one dimension, as they travel."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.as_strided((tensor.numel(),), (1,))  # of one or none any stride is contiguous
    for axis, count in enumerate(extent.size):  # without repetitions, which a copy would write out
        tensor = tensor.narrow(axis, 0, count)
    strides = extent.strides if extent.dense else _contiguous(extent.size)
    if tensor.stride() != strides or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty_strided(extent.size, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


def _copy(extent: Extent, memory: Buffer, offset: int) -> Tensor:
    size = extent.end - extent.start
    if not size:
        return room(0)
    found = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset + extent.start)
    return room(size).copy_(found)


def lay(elements: Tensor, extent: Extent) -> Tensor:
    """The tensor of these elements, laid as it left: in their own memory if it can be."""
    dtype, size, strides, wants_gradient, aligned = extent.shape
    if elements.numel() and (not extent.dense or aligned != alignment(elements)):
        found = elements.as_strided(extent.size, extent.strides) if extent.dense else elements.view(extent.size)
        elements = allocate(dtype, extent.size, extent.strides, aligned, elements.device).copy_(found)
    tensor = elements.as_strided(size, strides)
    return tensor.requires_grad_() if wants_gradient else tensor


def check_shape(shape: Shape) -> None:
    """Checks that a tensor can lie like this, and takes little more memory than its elements need."""
    dtype, size, strides, wants_gradient, aligned = shape
    is_sound = (
        all(type(number) is int and 0 <= number < 2**62 for number in (*size, *strides, aligned))
        and len(size) == len(strides) <= MOST_DIMENSIONS
        and aligned < LARGEST_UNIT
        and math.prod(max(n, 1) for n in size) * dtype.itemsize < 2**63
        and (wants_gradient is False or (wants_gradient is True and (dtype.is_floating_point or dtype.is_complex)))
    )
    if not is_sound:
        raise ValueError(f"a tensor that lies as {shape}")
    if too_wide := _why_too_wide(dtype, size, strides):
        raise ValueError(too_wide)


def _why_too_wide(dtype: torch.dtype, size: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    if 0 in size:
        return None
    pairs = [(n, stride) for n, stride in zip(size, strides, strict=True) if stride]  # others are only repeated
    sent = math.prod(n for n, _ in pairs) * dtype.itemsize
    reach = (sum((n - 1) * stride for n, stride in pairs) + 1) * dtype.itemsize
    if reach <= SPARE_BYTES + REACH_PER_BYTE * sent:
        return None
    return (
        f"a tensor of size {size} and strides {strides} would take {reach} bytes elsewhere, of which {sent} are its "
        f"own; return its .contiguous()"
    )


@lru_cache(CACHED_LAYOUTS)
def _read(text: bytes) -> Layout:
    with reading("a layout"):
        is_value, written, named, sharing = json.loads(text.decode())  # of bytes it would guess the encoding
        shapes = tuple(
            (DTYPES[dtype], tuple(size), tuple(strides), *others) for dtype, size, strides, *others in named
        )
        for shape in shapes:
            check_shape(shape)
        if is_value:
            leaves, spec = tree_flatten(_build(written, DEEPEST_TREE))
        else:
            leaves, spec = [_build(item, 0) for item in written], None
        numbers = {leaf.number for leaf in leaves if isinstance(leaf, At)}
        if numbers != set(range(len(shapes))):
            raise ValueError(f"tensors {sorted(numbers)} of {len(shapes)}")
        if not set(range(len(leaves))).issuperset(sharing):
            raise ValueError(f"tensors that share memory: {sharing} of {len(leaves)}")
        return Layout(spec, leaves, extents_of(shapes), frozenset(sharing))


def _write(value: object, numbered: dict[int, tuple[int, Tensor]]) -> Any:
    """A value in words of JSON: of a tensor its number, and a list of kind and parts of what is no number or text."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    match value:
        case Tensor():
            return ["tensor", numbered.setdefault(id(value), (len(numbered), value))[0]]
        case complex():
            return ["complex", value.real, value.imag]
        case bytes():
            return ["bytes", value.hex()]
        case torch.dtype():
            return ["dtype", _name(value)]
        case Undefined():
            return ["undefined"]
        case type() if FACTORIES.get(kind_name := value.__name__) is value:
            return ["type", kind_name]
    parts, spec = _parts_of(value)
    registered = registration(kind)
    if spec.type is None or (registered is None and kind not in CONTAINERS.values()):
        raise TypeError(f"a {kind.__name__} cannot go to another process; {ADVICE}")
    children = [_write(part, numbered) for part in parts]
    if kind in CONTAINERS.values():
        return [kind.__name__, _write(spec.context, numbered), children]
    if spec.type is namedtuple:
        return [f"namedtuple {registered.serialized_type_name}", None, children]
    write = registered.to_dumpable_context or (lambda context: _write(context, numbered))
    return [f"registered {registered.serialized_type_name}", write(spec.context), children]


def _parts_of(value: object) -> tuple[list[Any], TreeSpec]:
    return tree_flatten(value, is_leaf=lambda part: part is not value)


def _build(written: Any, deepest: int) -> object:
    """What `_write` wrote, with `At` for tensors. Nothing is imported for it, and no attribute looked up by name."""
    match written:
        case None | bool() | int() | float() | str():
            return written
        case ["tensor", int(number)] if number is not True and number >= 0:
            return At(number)
        case ["complex", int() | float() as real, int() | float() as imaginary]:
            return complex(real, imaginary)
        case ["bytes", str(digits)]:
            return bytes.fromhex(digits)
        case ["dtype", str(name)] if name in DTYPES:
            return DTYPES[name]
        case ["type", str(name)] if name in FACTORIES:
            return FACTORIES[name]
        case ["undefined"]:
            return UNDEFINED
        case [str(name), context, list(children)] if deepest:
            return _container(name, context, [_build(child, deepest - 1) for child in children], deepest)
    raise ValueError(f"there is nothing that is written as {repr(written)[:100]}")


def _container(name: str, context: Any, parts: list[object], deepest: int) -> object:
    leaves = [LEAF] * len(parts)
    if name in CONTAINERS:
        context = _build(context, deepest - 1)
        made = tree_unflatten(parts, TreeSpec(CONTAINERS[name], context, leaves))
        again, spec = _parts_of(made)
        if (again, spec.context) != (parts, context):  # other keys, or too few
            raise ValueError(f"there is no {name} of {len(parts)} parts and {repr(context)[:100]}")
        return made
    form, _, known = name.partition(" ")
    kind = registered_class(known)
    if kind is None or kind in CONTAINERS.values() or form not in ("namedtuple", "registered"):
        raise ValueError(f"{name[:200]!r} is not registered with torch.utils._pytree in this process; register it")
    if form == "registered":
        read = registration(kind).from_dumpable_context or (lambda context: _build(context, deepest - 1))
        return tree_unflatten(parts, TreeSpec(kind, read(context), leaves))
    if len(getattr(kind, "_fields", ())) != len(parts):
        raise ValueError(f"{known} is no named tuple of {len(parts)} parts")
    return tree_unflatten(parts, TreeSpec(namedtuple, kind, leaves))
