"""Messages as bytes: a layout that says what there is, and the bytes of the tensors behind it. No pickle.

A tensor arrives with the strides that it left with, because the bits of what is computed from it depend on them. A
layout is written and read once for as long as shapes stay the same: both ends keep those that they have seen.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gpipe.run.boundary import Parcel
from gpipe.run.microbatch import Tree
from gpipe.run.transport import Message

ALIGNMENT = 64  # bytes, as torch allocates: kernels may compute other bits on other alignments
KEPT = 1024  # layouts

Shape: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bool]
"""What is known of a tensor before it comes: dtype, size, strides, whether it requires a gradient."""


@dataclass(frozen=True, slots=True)
class Place:
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
class Layout:
    """What a message holds: its tree, with a place in `places` for each tensor and the other values themselves."""

    is_parcel: bool
    spec: pytree.TreeSpec | None  # None: one tensor and nothing around it
    leaves: tuple[object, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message as it is sent: its layout in bytes, and its tensors, each flat, to be put at its place."""

    layout: bytes
    flat: list[Tensor]
    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        """How many bytes the tensors take, with what aligns them."""
        return self.places[-1].end if self.places else 0

    def write(self, memory: Tensor) -> None:
        """Puts the tensors into `size` bytes."""
        for tensor, place in zip(self.flat, self.places, strict=True):
            memory[place.start : place.end].view(tensor.dtype).copy_(tensor)


@dataclass(frozen=True, slots=True)
class At:
    """A leaf of a tree that is a tensor: its number among the tensors of the message."""

    number: int


def encode(message: Message) -> Encoded:
    """What is sent of a message.

    Raises:
        TypeError: It holds something that cannot go to another process.
    """
    is_parcel = isinstance(message, Parcel)
    tree: Tree = message.value if isinstance(message, Parcel) else message
    if type(tree) is Tensor:
        tensors = [tree]
        shapes: tuple[Shape, ...] = (_shape(tree),)
        layout = _write(is_parcel, None, (), shapes)
    else:
        items, spec = pytree.tree_flatten(tree)
        numbers: dict[int, int] = {}
        tensors = []
        leaves: list[object] = []
        for item in items:
            if not isinstance(item, Tensor):
                leaves.append(_plain(item))
                continue
            if id(item) not in numbers:
                numbers[id(item)] = len(tensors)
                tensors.append(item)
            leaves.append(["tensor", numbers[id(item)]])
        shapes = tuple(map(_shape, tensors))
        layout = _write(is_parcel, _spec_text(spec), json.dumps(leaves), shapes)
    places = _places(shapes)
    with torch.no_grad():
        return Encoded(layout, [_flat(t, place) for t, place in zip(tensors, places, strict=True)], places)


def decode(layout: bytes, memory: Tensor) -> Message:
    """The message of a layout and the bytes behind it, which may be used again afterwards."""
    read = _read(layout)
    tensors = [_take(place, memory) for place in read.places]
    if read.spec is None:
        value: Tree = tensors[0]
    else:
        items = [tensors[leaf.number] if isinstance(leaf, At) else leaf for leaf in read.leaves]
        value = pytree.tree_unflatten(items, read.spec)
    if not read.is_parcel:
        return value  # type: ignore[return-value]  # a list of gradients, as it was sent
    return Parcel(value, [tensor for tensor in tensors if tensor.requires_grad])


def _shape(tensor: Tensor) -> Shape:
    if tensor.layout != torch.strided or type(tensor) is not Tensor:
        raise TypeError(
            f"a {type(tensor).__name__} of layout {tensor.layout} cannot go to another process; return a dense "
            f"torch.Tensor (of a DTensor, its full_tensor() or to_local())"
        )
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad


@lru_cache(KEPT)
def _places(shapes: tuple[Shape, ...]) -> tuple[Place, ...]:
    places: list[Place] = []
    at = 0
    for shape in shapes:
        dtype, size, strides, _ = shape
        start = -(-at // ALIGNMENT) * ALIGNMENT
        own = tuple(1 if stride == 0 else n for n, stride in zip(size, strides, strict=True))
        ranked = sorted((stride, n) for n, stride in zip(own, strides, strict=True) if n != 1)
        dense = apart = True
        reach = 1  # elements up to the end of what was looked at
        for stride, n in ranked:
            dense, apart = dense and stride == reach, apart and stride >= reach
            reach = stride * (n - 1) + reach
        count = torch.Size(own).numel()
        if not apart and count:  # elements that overlap in another way
            own, strides, dense = size, torch.empty(size, device="meta").stride(), True
            shape = (dtype, size, strides, shape[3])
            count = torch.Size(own).numel()
        at = start + count * dtype.itemsize
        places.append(Place(shape, start, at, own, strides, dense))
    return tuple(places)


def _flat(tensor: Tensor, place: Place) -> Tensor:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    count = (place.end - place.start) // tensor.element_size()
    if tensor.stride() != place.strides:  # resolved just now, or overlapping
        if not place.dense or torch.empty(place.size, device="meta").stride() == place.strides:
            return tensor.expand(place.size).contiguous().view(-1)
        tensor = torch.empty_strided(place.size, place.strides, dtype=tensor.dtype).copy_(tensor)
    if place.dense:
        return tensor.as_strided((count,), (1,))
    return tensor.as_strided(place.size, place.strides).contiguous().view(-1)


def _take(place: Place, memory: Tensor) -> Tensor:
    dtype, size, strides, wants_gradient = place.shape
    tensor = torch.empty_strided(place.size, place.strides, dtype=dtype)
    count = (place.end - place.start) // dtype.itemsize
    if count:
        found = memory[place.start : place.end].view(dtype)
        if place.dense:
            tensor.as_strided((count,), (1,)).copy_(found)
        else:
            tensor.copy_(found.view(place.size))
    if place.size != size:
        tensor = tensor.as_strided(size, strides)
    return tensor.requires_grad_() if wants_gradient else tensor


@lru_cache(KEPT)
def _write(is_parcel: bool, spec: str | None, leaves: str, shapes: tuple[Shape, ...]) -> bytes:
    named = [[str(dtype).removeprefix("torch."), size, strides, wants] for dtype, size, strides, wants in shapes]
    return json.dumps([is_parcel, spec, leaves and json.loads(leaves), named]).encode()


@lru_cache(KEPT)
def _read(layout: bytes) -> Layout:
    is_parcel, spec, leaves, named = json.loads(layout)
    shapes = tuple(
        (getattr(torch, dtype), tuple(size), tuple(strides), wants) for dtype, size, strides, wants in named
    )
    tree = None if spec is None else pytree.treespec_loads(spec)
    return Layout(is_parcel, tree, tuple(map(_unplain, leaves)), _places(shapes))


def _spec_text(spec: pytree.TreeSpec) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, ValueError, TypeError) as error:
        raise TypeError(
            f"{spec} cannot go to another process: {error}; return tensors, tuples, lists and dicts, or register the "
            f"class with torch.utils._pytree under a serialized_type_name"
        ) from error


def _plain(leaf: object) -> list[Any]:
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
    raise TypeError(
        f"a {type(leaf).__name__} cannot go to another process; return tensors, numbers, strings, None, or tuples, "
        f"lists and dicts of them"
    )


def _unplain(written: Sequence[Any]) -> object:
    kind, *parts = written
    match kind:
        case "tensor":
            return At(parts[0])
        case "complex":
            return complex(*parts)
        case "bytes":
            return bytes.fromhex(parts[0])
        case "size":
            return torch.Size(parts)
        case "dtype":
            return getattr(torch, parts[0])
        case _:
            return parts[0]
