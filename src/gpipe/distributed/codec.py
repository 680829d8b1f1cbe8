"""Messages as bytes: a layout that says what there is, and the bytes of the tensors behind it. No pickle.

A tensor arrives as it lay when it left (layout.py), because the bits of what is computed from it depend on that. A
layout is written and read once for as long as shapes stay the same: both ends keep those that they have seen.

What is no tensor is text: the tree of a value, and its leaves. It names no class, module or attribute that the other
end would look up by itself: only kinds of the tables below, and, by the name under which they were registered with
torch's pytrees *in that process*, classes of the user.
"""

import json
import math
import mmap
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gpipe._torch.trees import (
    TreeSpec,
    context_reader,
    context_writer,
    registered_class,
    registered_name,
    tree_flatten,
    tree_unflatten,
)
from gpipe.distributed.frames import Damaged, check_shape, reading, why_too_wide
from gpipe.stages.boundary import UNDEFINED, BoundaryValue, Undefined
from gpipe.stages.layout import alignment, allocate
from gpipe.stages.messages import Message, Payload

ALIGNED_BYTES = 64  # bytes: where in a message tensors begin
CACHED_LAYOUTS = 1024  # layouts
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


@lru_cache(CACHED_LAYOUTS)
def _payload(dtype: torch.dtype, size: torch.Size, strides: tuple[int, ...]) -> Payload:
    (extent,) = extents_of(((dtype, tuple(size), strides, False, ALIGNED_BYTES),))
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
    """What is known of a tensor before it comes; one that is not dense, or more than a tensor, is refused."""
    if tensor.layout != torch.strided or type(tensor) is not Tensor:
        raise TypeError(NOT_DENSE.format(name=type(tensor).__name__, layout=tensor.layout))
    if tensor.is_quantized:
        raise TypeError("a quantized tensor cannot go to another process; return its .dequantize()")
    if too_wide := why_too_wide(tensor.dtype, tuple(tensor.shape), tensor.stride()):
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


@lru_cache(CACHED_LAYOUTS)
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


# Trees and leaves, as text.

DEEPEST_TREE = 100  # containers around a leaf
DTYPES = {
    str(value).removeprefix("torch."): value
    for name in sorted(dir(torch))
    if isinstance(value := getattr(torch, name), torch.dtype)
}
"""What a message may name as a dtype."""
CONTAINERS = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict, "Size": torch.Size}
FACTORIES: dict[str | None, Any] = {
    None: None, "list": list, "dict": dict, "tuple": tuple, "set": set, "int": int, "float": float, "str": str,
}  # fmt: skip
"""What a message may name as what a defaultdict makes."""
BUILT_IN = frozenset({*CONTAINERS.values(), deque, defaultdict, namedtuple})
LEAF = tree_flatten(0)[1]

Json = Any
ADVICE = (
    "return tensors, tuples, lists, dicts (keys: strings, numbers, None, tuples of them), or register the class "
    "with torch.utils._pytree under a serialized_type_name, in every process"
)


@dataclass(frozen=True, slots=True)
class At:
    """A leaf of a tree that is a tensor: its number among the tensors of the message."""

    number: int


def write_tree(spec: TreeSpec) -> str:
    """The text of a tree, which `read_tree` reads; a TypeError where that could not make it again."""
    try:
        text = json.dumps(_written(spec))
        _rebuild(text)
        return text
    except (NotImplementedError, ValueError, TypeError, RecursionError) as error:
        raise TypeError(f"{spec} cannot go to another process: {error}; {ADVICE}") from error


@lru_cache(CACHED_LAYOUTS)
def _rebuild(text: str) -> None:
    """Builds such a tree, as the other end will."""
    read = read_tree(text)
    tree_unflatten([None] * read.num_leaves, read)


def _written(spec: TreeSpec) -> Json:
    """A tree in words of JSON: None for a leaf, else the kind, what belongs to it, and the children."""
    if spec.type is None:
        return None
    kind, context = spec.type, spec.context
    children = [_written(child) for child in spec.children()]
    if kind in (tuple, list, torch.Size):
        return [kind.__name__, None, children]
    if kind in (dict, OrderedDict):
        return [kind.__name__, [write_plain(key) for key in context], children]
    if kind is deque:
        return ["deque", context, children]
    if kind is defaultdict:
        return ["defaultdict", [_name_of_factory(context[0]), [write_plain(key) for key in context[1]]], children]
    if kind is namedtuple:
        return ["namedtuple", _registered_name(context), children]
    name = _registered_name(kind)
    write = context_writer(kind) or write_plain
    return [f"registered {name}", write(context), children]


def _registered_name(kind: type) -> str:
    name = registered_name(kind)
    if name is None:
        raise TypeError(f"{kind.__name__} is not registered under a name")
    return name


def _name_of_factory(factory: object) -> str | None:
    for name, known in FACTORIES.items():
        if known is factory:
            return name
    raise TypeError(
        f"a defaultdict that makes {factory!r} cannot be named; those of {', '.join(map(str, FACTORIES))} can"
    )


def read_tree(text: str) -> TreeSpec:
    """The tree that `write_tree` wrote. Nothing is imported for it, and no attribute looked up by name.

    Raises:
        ValueError: Nothing writes that, or it names what this process has not registered.
    """
    try:
        return _tree_of(json.loads(text), DEEPEST_TREE)
    except RecursionError:
        raise ValueError("a tree too deep") from None


def _tree_of(written: Json, deepest: int) -> TreeSpec:
    if written is None:
        return LEAF
    match written:
        case [str(kind), context, list(children)] if deepest:
            found = [_tree_of(child, deepest - 1) for child in children]
        case _:
            raise ValueError(f"there is no tree that is written as {_shown(written)}")
    match kind, context:
        case (("tuple" | "list" | "Size"), None):
            return TreeSpec(CONTAINERS[kind], None, found)
        case (("dict" | "OrderedDict"), list(keys)) if len(keys) == len(found):
            return TreeSpec(CONTAINERS[kind], _keys(keys), found)
        case "deque", None | int():
            return TreeSpec(deque, context, found)
        case "defaultdict", [str() | None as made, list(keys)] if made in FACTORIES and len(keys) == len(found):
            return TreeSpec(defaultdict, [FACTORIES[made], _keys(keys)], found)
        case "namedtuple", str(name):
            known = _registered(name)
            if len(getattr(known, "_fields", ())) == len(found):
                return TreeSpec(namedtuple, known, found)
        case _ if kind.startswith("registered "):
            known = _registered(kind.removeprefix("registered "))
            read = context_reader(known) or read_plain
            return TreeSpec(known, read(context), found)
    raise ValueError(f"there is no tree that is written as {_shown(written)}")


def _registered(name: str) -> Any:
    known = registered_class(name)
    if known is None or known in BUILT_IN:
        raise ValueError(f"{name[:200]!r} is not registered with torch.utils._pytree in this process; register it")
    return known


def _keys(written: list[Json]) -> list[Any]:
    keys = list(map(read_plain, written))
    try:
        if len(set(keys)) == len(keys):
            return keys
    except TypeError:
        pass
    raise ValueError(f"these are no keys of a dict: {_shown(keys)}")


def write_plain(value: object) -> Json:
    """A key, or what a class keeps beside its tensors, in words of JSON."""
    kind = type(value)
    if kind is float and not math.isfinite(value):  # type: ignore[arg-type]  # a float then
        return {"float": repr(value)}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (tuple, list):
        return {kind.__name__: [write_plain(item) for item in value]}  # type: ignore[attr-defined]  # a container then
    raise TypeError(f"{value!r} is of type {kind.__name__}")


def read_plain(written: Json) -> Any:
    """What `write_plain` wrote."""
    match written:
        case None | bool() | int() | float() | str():
            return written
        case {"float": ("inf" | "-inf" | "nan") as value, **other} if not other:
            return float(value)
        case {"tuple": list(items), **other} if not other:
            return tuple(map(read_plain, items))
        case {"list": list(items), **other} if not other:
            return list(map(read_plain, items))
    raise ValueError(f"there is no value that is written as {_shown(written)}")


def _shown(written: object) -> str:
    text = repr(written)
    return text if len(text) < 100 else f"{text[:100]}..."


def write_leaf(leaf: object) -> list[Any]:
    """A leaf that is no tensor, in words of JSON: its type, and what it is."""
    match leaf:
        case None | bool() | int() | float() | str() if type(leaf) in (type(None), bool, int, float, str):
            return ["value", leaf]
        case complex():
            return ["complex", leaf.real, leaf.imag]
        case bytes():
            return ["bytes", leaf.hex()]
        case torch.Size():
            return ["size", *leaf]
        case torch.dtype():
            return ["dtype", str(leaf).removeprefix("torch.")]
        case Undefined():
            return ["undefined"]
    raise TypeError(
        f"a {type(leaf).__name__} cannot go to another process; return tensors, numbers, strings, None, or tuples, "
        f"lists and dicts of them"
    )


def read_leaf(written: Json) -> object:
    """What `write_leaf` wrote; `["tensor", number]` is where a tensor was."""
    match written:
        case ["tensor", int(number)] if number is not True and number >= 0:
            return At(number)
        case ["value", None | bool() | int() | float() | str() as value]:
            return value
        case ["complex", int() | float() as real, int() | float() as imaginary]:
            return complex(real, imaginary)
        case ["bytes", str(value)]:
            return bytes.fromhex(value)
        case ["size", *sizes] if all(type(size) is int for size in sizes):
            return torch.Size(sizes)
        case ["dtype", str(name)]:
            return read_dtype(name)
        case ["undefined"]:
            return UNDEFINED
    raise ValueError(f"there is no leaf that is written as {_shown(written)}")


def read_dtype(name: object) -> torch.dtype:
    """The dtype of a name."""
    if isinstance(name, str) and name in DTYPES:
        return DTYPES[name]
    raise ValueError(f"there is no dtype {_shown(name)}")
