"""Encodes messages as bytes, without pickle.

An encoded message consists of a layout, which describes the message, and the bytes of its tensors. A tensor keeps its
strides and alignment (see stages/memory_layout.py), because they can change the rounding of later results. Sender and
receiver cache layouts, so each layout is parsed only once while shapes stay the same.

The layout is JSON. The receiver never imports a module or looks up an attribute by a name in the layout. A layout can
name only the types listed below, and user classes that the receiving process has registered with torch's pytrees.
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
from gpipe.errors import RemoteError, received_error
from gpipe.stages.boundary import UNDEFINED, BoundaryValue, Undefined
from gpipe.stages.memory_layout import LARGEST_UNIT, alignment, allocate
from gpipe.stages.messages import Message
from gpipe.stages.traffic import Payload

ALIGNED_BYTES = 64  # tensors begin at multiples of this offset
CACHED_LAYOUTS = 1024
LARGE_BYTES = 2**21  # buffers of at least this size are mapped, so that they can use huge pages
MOST_PIECES = 2**9  # buffers in one sendmsg call; the kernel accepts just under 2**10
MOST_DIMENSIONS = 64  # limit of torch's kernels
SPARE_BYTES, REACH_PER_BYTE = 2**30, 2**16
"""The memory that a strided tensor may span: a constant number of bytes, plus a factor for each byte of its elements.

The limit permits a column of a wide matrix.
"""
DEEPEST_TREE = 100  # nested containers
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype}
CONTAINERS = {kind.__name__: kind for kind in (tuple, list, dict, OrderedDict, torch.Size, deque, defaultdict)}
FACTORIES = {kind.__name__: kind for kind in (list, dict, tuple, set, int, float, str)}
"""The default factories that a received defaultdict may have."""
LEAF = tree_flatten(0)[1]
ADVICE = (
    "Return tensors, numbers, strings, None, or tuples, lists and dicts of these. Or register the class with "
    "torch.utils._pytree under a serialized_type_name in every process. [cannot-be-sent]"
)

Buffer: TypeAlias = bytearray | mmap.mmap
Shape: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bool, int]
"""The metadata of a tensor: dtype, size, strides, `requires_grad`, and alignment."""


class PeerClosed(ConnectionError):  # noqa: N818  # callers handle it as a state of the connection
    """Raised if the peer process has ended, or can no longer be reached."""


class CorruptMessage(ValueError):  # noqa: N818  # callers handle it as a state of the message
    """Raised if a message is not in the format that gpipe sends."""


def corrupt_message_error(peer: int, error: object) -> RemoteError:
    """Returns the RemoteError to raise if a peer sent a corrupt message."""
    return received_error(f"rank {peer} sent a message that gpipe never sends: {error}", peer)


@contextmanager
def decoding(what: str, peer: int | None = None) -> Iterator[None]:
    """Converts exceptions in the context to `CorruptMessage`, or to a RemoteError if the peer is known."""
    try:
        yield
    except (ValueError, TypeError, LookupError, RuntimeError, RecursionError, OverflowError, AttributeError) as error:
        text = f"{what} that gpipe does not send: {type(error).__name__}: {str(error)[:300]}"
        corrupt = error if isinstance(error, CorruptMessage) else CorruptMessage(text)
        raise (corrupt if peer is None else corrupt_message_error(peer, corrupt)) from error


@dataclass(frozen=True, slots=True)
class Extent:
    """The position of a tensor's elements in a message, and the memory layout of the elements.

    Attributes:
        shape: The metadata of the tensor.
        start: The offset of the tensor's first byte in the message.
        end: The offset after the tensor's last byte.
        size: The size of the tensor that is sent. Dimensions of stride 0 have size 1 here, and the receiver expands
            them.
        strides: The strides that belong to `size`.
        dense: Whether elements are sent in memory order. If False, elements are sent in index order.
    """

    shape: Shape
    start: int
    end: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    dense: bool


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """A placeholder among the leaves of a message, with the index of a tensor in the list of tensors."""

    index: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The parsed layout of a message.

    Attributes:
        spec: The tree structure of a value, or None for a list of gradients.
        leaves: The leaves of the tree, with a `TensorIndex` for each tensor.
        extents: One extent for each tensor.
        sharing: See `BoundaryValue`.
    """

    spec: TreeSpec | None
    leaves: Sequence[object]
    extents: tuple[Extent, ...]
    sharing: frozenset[int]

    @property
    def size(self) -> int:
        return self.extents[-1].end if self.extents else 0


class Encoded(NamedTuple):
    """An encoded message.

    Attributes:
        layout: The layout as JSON.
        extents: One extent for each tensor.
        size: The number of bytes of all tensors, with padding for alignment.
        tensors: The tensors.
    """

    layout: bytes
    extents: tuple[Extent, ...]
    size: int
    tensors: list[Tensor]

    def write(self, memory: Tensor) -> None:
        """Copies each tensor to its extent in `memory`."""
        with torch.no_grad():
            for tensor, extent in zip(self.tensors, self.extents, strict=True):
                if extent.end > extent.start:
                    memory[extent.start : extent.end].view(tensor.dtype).copy_(flat_elements(tensor, extent))

    def pieces(self) -> list[memoryview]:
        """Returns the `size` bytes as consecutive buffers. Most buffers are views of the tensors, not copies."""
        pieces, offset = [], 0
        for tensor, extent in zip(self.tensors, self.extents, strict=True):
            if extent.start > offset:
                pieces.append(memoryview(bytes(extent.start - offset)))
            pieces.append(flat_elements(tensor, extent).cpu().view(torch.uint8).numpy().data)
            offset = extent.end
        return pieces if len(pieces) < MOST_PIECES else [memoryview(b"".join(pieces))]


def encode(message: Message) -> Encoded:
    """Encodes a message.

    Raises:
        TypeError: If a value in the message cannot be sent to another process.
    """
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
                f"A tensor with custom attributes ({', '.join(attributes)}) cannot be sent to another process. "
                f"Return a tuple or dict with the tensor and the values of these attributes. [cannot-be-sent]"
            )
    text = json.dumps([is_value, written, shapes, sharing]).encode()
    try:
        layout = _parse_layout(text)  # as the receiver does
    except CorruptMessage as error:
        raise TypeError(f"A value cannot be sent to another process: {error.__cause__}. {ADVICE}") from error
    return Encoded(text, layout.extents, layout.size, tensors)


def payload_of(message: Message) -> tuple[Payload, ...]:
    """Returns dtype, shape and number of sent bytes for each tensor of a message. Shared tensors occur once.

    The sender and the receiver return equal results.

    >>> payload_of([torch.ones(2, 3), None, torch.ones(1).expand(4)])
    (Payload(dtype='float32', shape=(2, 3), size=24), Payload(dtype='float32', shape=(4,), size=4))
    """
    items = tree_flatten(message.value)[0] if isinstance(message, BoundaryValue) else message
    tensors = {id(item): item for item in items if isinstance(item, Tensor)}.values()
    return tuple(Payload(_name(t.dtype), tuple(t.shape), extents_of((shape_of(t),))[0].end) for t in tensors)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decode(layout: bytes, memory: Buffer, offset: int = 0, *, size: int | None = None) -> Message:
    """Decodes a message, and copies its tensors out of `memory`.

    Args:
        layout: The layout as JSON.
        memory: The buffer with the bytes of the tensors.
        offset: The offset of the tensors in the buffer.
        size: The number of tensor bytes that the sender announced, or None for all bytes after `offset`.

    Raises:
        CorruptMessage: If the layout is invalid, or does not match the number of bytes.
    """
    parsed = _parse_layout(layout)
    if offset + parsed.size > len(memory) or size not in (None, parsed.size):
        raise CorruptMessage(f"tensors of {parsed.size} bytes in a message of {size or len(memory) - offset} bytes")
    return assemble(layout, [_copy(extent, memory, offset) for extent in parsed.extents])


def read_elements(layout: bytes, size: int, fill: Callable[[memoryview], None]) -> list[Tensor]:
    """Reads the `size` bytes of a message into one buffer per tensor.

    `fill` reads the next bytes into a buffer. Memory for a tensor is allocated only after the previous tensor is
    complete.
    """
    parsed, buffers, offset = _parse_layout(layout), list[Tensor](), 0
    if parsed.size != size:
        raise CorruptMessage(f"tensors of {parsed.size} bytes in a message of {size} bytes")
    for extent in parsed.extents:
        fill(memoryview(bytearray(extent.start - offset)))
        buffers.append(allocate_buffer(extent.end - extent.start))
        fill(buffers[-1].numpy().data)
        offset = extent.end
    return buffers


def allocate_buffer(size: int) -> Tensor:
    """Returns an uninitialized buffer. A large buffer uses physical memory only for pages that were written.

    Page faults of new memory can take longer than the transfer: 32 ms for 64 MiB, or 2 ms with pages of 2 MiB. gpipe
    therefore keeps two unused buffers for reuse.
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
            raise MemoryError(f"No memory for a message of {size} bytes from another process.") from error
        with suppress(OSError, AttributeError):  # the system has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8, size)
    weakref.finalize(array, _spare.append, memory).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


_spare: deque[mmap.mmap] = deque(maxlen=2)


def assemble(layout: bytes, buffers: Sequence[Tensor]) -> Message:
    """Builds a message from its layout and the bytes of each tensor."""
    parsed = _parse_layout(layout)
    # Buffers are uint8 up to here: torch crashes when it reads complex128 from an unaligned address.
    pairs = zip(buffers, parsed.extents, strict=True)
    tensors = [restore_layout(buffer.view(extent.shape[0]), extent) for buffer, extent in pairs]
    items: list[Any] = [tensors[leaf.index] if isinstance(leaf, TensorIndex) else leaf for leaf in parsed.leaves]
    if parsed.spec is None:
        return items
    value = tree_unflatten(items, parsed.spec)
    return BoundaryValue(value, [tensor for tensor in tensors if tensor.requires_grad], sharing=parsed.sharing)


def shape_of(tensor: Tensor) -> Shape:
    """Returns the metadata of a tensor.

    Raises:
        TypeError: If the tensor cannot be sent, because it is sparse, is quantized, has a subclass of `torch.Tensor`,
            or spans too much memory.
    """
    if tensor.layout != torch.strided or type(tensor) is not Tensor:
        raise TypeError(
            f"A {type(tensor).__name__} of layout {tensor.layout} cannot be sent to another process. Return a dense "
            f"torch.Tensor. For a DTensor, use full_tensor() or to_local(). [cannot-be-sent]"
        )
    if tensor.is_quantized:
        raise TypeError("A quantized tensor cannot be sent to another process. Use dequantize(). [cannot-be-sent]")
    if too_wide := _why_too_wide(tensor.dtype, tuple(tensor.shape), tensor.stride()):
        raise TypeError(too_wide)
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, alignment(tensor)


@lru_cache(CACHED_LAYOUTS)
def extents_of(shapes: tuple[Shape, ...]) -> tuple[Extent, ...]:
    """Returns the extent in a message of each tensor, given the metadata of all tensors."""
    extents: list[Extent] = []
    end = 0
    for shape in shapes:
        dtype, size, strides, requires_grad, aligned = shape
        start = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
        sent_size = tuple(1 if stride == 0 and n else n for n, stride in zip(size, strides, strict=True))
        by_stride = sorted((stride, n) for n, stride in zip(sent_size, strides, strict=True) if n != 1)
        dense = distinct = True
        reach = 1  # elements spanned by the dimensions so far
        for stride, n in by_stride:
            dense, distinct = dense and stride == reach, distinct and stride >= reach
            reach = stride * (n - 1) + reach
        if not distinct and 0 not in size:  # elements overlap, other than by stride 0
            sent_size, strides, dense = size, _contiguous(size), True
            shape = (dtype, size, strides, requires_grad, aligned)
        end = start + math.prod(sent_size) * dtype.itemsize
        extents.append(Extent(shape, start, end, sent_size, strides, dense))
    return tuple(extents)


def flat_elements(tensor: Tensor, extent: Extent) -> Tensor:
    """Returns the elements of a tensor in sending order, as a one-dimensional tensor."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.as_strided((tensor.numel(),), (1,))  # is_contiguous() ignores strides of dimensions of size 1
    for axis, count in enumerate(extent.size):  # drop repeated elements
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
        return allocate_buffer(0)
    elements = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset + extent.start)
    return allocate_buffer(size).copy_(elements)


def restore_layout(elements: Tensor, extent: Extent) -> Tensor:
    """Returns a tensor with the given elements and the sender's strides and alignment. Copies only if necessary."""
    dtype, size, strides, requires_grad, aligned = extent.shape
    if elements.numel() and (not extent.dense or aligned != alignment(elements)):
        source = elements.as_strided(extent.size, extent.strides) if extent.dense else elements.view(extent.size)
        elements = allocate(dtype, extent.size, extent.strides, aligned, elements.device).copy_(source)
    tensor = elements.as_strided(size, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def check_shape(shape: Shape) -> None:
    """Checks the metadata of a tensor that a peer sent.

    Raises:
        ValueError: If the metadata is impossible, or if the tensor would span far more memory than its elements.
    """
    dtype, size, strides, requires_grad, aligned = shape
    is_sound = (
        all(type(number) is int and 0 <= number < 2**62 for number in (*size, *strides, aligned))
        and len(size) == len(strides) <= MOST_DIMENSIONS
        and aligned < LARGEST_UNIT
        and math.prod(max(n, 1) for n in size) * dtype.itemsize < 2**63
        and (requires_grad is False or (requires_grad is True and (dtype.is_floating_point or dtype.is_complex)))
    )
    if not is_sound:
        raise ValueError(f"invalid tensor metadata {shape}")
    if too_wide := _why_too_wide(dtype, size, strides):
        raise ValueError(too_wide)


def _why_too_wide(dtype: torch.dtype, size: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    if 0 in size:
        return None
    pairs = [(n, stride) for n, stride in zip(size, strides, strict=True) if stride]  # stride 0 only repeats elements
    sent = math.prod(n for n, _ in pairs) * dtype.itemsize
    reach = (sum((n - 1) * stride for n, stride in pairs) + 1) * dtype.itemsize
    if reach <= SPARE_BYTES + REACH_PER_BYTE * sent:
        return None
    return (
        f"A tensor of size {size} and strides {strides} spans {reach} bytes, but its elements are only {sent} bytes. "
        f"Return tensor.contiguous(). [cannot-be-sent]"
    )


@lru_cache(CACHED_LAYOUTS)
def _parse_layout(text: bytes) -> Layout:
    with decoding("a layout"):
        is_value, written, named, sharing = json.loads(text.decode())  # json.loads(bytes) would guess the encoding
        shapes = tuple((DTYPES[dtype], tuple(size), tuple(strides), *rest) for dtype, size, strides, *rest in named)
        for shape in shapes:
            check_shape(shape)
        if is_value:
            leaves, spec = tree_flatten(_build(written, DEEPEST_TREE))
        else:
            leaves, spec = [_build(item, 0) for item in written], None
        indices = {leaf.index for leaf in leaves if isinstance(leaf, TensorIndex)}
        if indices != set(range(len(shapes))):
            raise ValueError(f"tensors {sorted(indices)} of {len(shapes)}")
        if not set(range(len(leaves))).issuperset(sharing):
            raise ValueError(f"tensors {sharing} of {len(leaves)} share memory")
        return Layout(spec, leaves, extents_of(shapes), frozenset(sharing))


def _write(value: object, numbered: dict[int, tuple[int, Tensor]]) -> Any:
    """Converts a value to JSON: a list of a type name and the content, except for numbers, strings and None."""
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
        raise TypeError(f"A {kind.__name__} cannot be sent to another process. {ADVICE}")
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
    """Converts the JSON of `_write` back to a value, with a `TensorIndex` in place of each tensor.

    For security, this function imports nothing and looks up no attribute by a received name.
    """
    match written:
        case None | bool() | int() | float() | str():
            return written
        case ["tensor", int(number)] if number is not True and number >= 0:
            return TensorIndex(number)
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
    raise ValueError(f"no value is encoded as {repr(written)[:100]}")


def _container(name: str, context: Any, parts: list[object], deepest: int) -> object:
    leaves = [LEAF] * len(parts)
    if name in CONTAINERS:
        context = _build(context, deepest - 1)
        container = tree_unflatten(parts, TreeSpec(CONTAINERS[name], context, leaves))
        again, spec = _parts_of(container)
        if (again, spec.context) != (parts, context):  # for example, duplicate keys
            raise ValueError(f"no {name} has {len(parts)} parts and context {repr(context)[:100]}")
        return container
    form, _, registered_name = name.partition(" ")
    kind = registered_class(registered_name)
    if kind is None or kind in CONTAINERS.values() or form not in ("namedtuple", "registered"):
        raise ValueError(f"{name[:200]!r} is not registered with torch.utils._pytree in this process")
    if form == "registered":
        read = registration(kind).from_dumpable_context or (lambda context: _build(context, deepest - 1))
        return tree_unflatten(parts, TreeSpec(kind, read(context), leaves))
    if len(getattr(kind, "_fields", ())) != len(parts):
        raise ValueError(f"{registered_name} is not a named tuple with {len(parts)} fields")
    return tree_unflatten(parts, TreeSpec(namedtuple, kind, leaves))
