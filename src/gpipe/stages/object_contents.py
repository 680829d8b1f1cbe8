"""Reads, writes and compares the contents of each kind of mutable object.

Objects are read through their builtin base class (`dict.values(x)`, not `x.values()`), so no code of user classes
runs. Contents are written in place, so objects keep their identity.
"""

import array
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partialmethod
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpipe.stages.digest import INTEGERS
from gpipe.stages.memory_layout import restore_values, strided_parts, unexpanded

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device})
"""Types without mutable state. Values of these types are compared by value, all other values by identity."""


class Contents(NamedTuple):
    """The contents of an object: its values, and their keys if it is a mapping or has attributes."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Kind:
    """Functions that read and write objects of one kind, and name an item in a message.

    `matches` is a quick test. True means that the contents are unchanged. False means that they must be compared.
    """

    read: Callable[[Any], Contents]
    write: Callable[[Any, Contents], object]
    matches: Callable[[Any, Contents], bool] = lambda holder, contents: False
    label: Callable[[Any], str] = lambda key: f"[{key!r}]" if type(key) in ATOMS else f"[{type(key).__name__}]"


def _write_items(base: Any) -> Callable[[Any, Contents], None]:
    def write(holder: Any, contents: Contents) -> None:
        if not _all_same(tuple(base.keys(holder)), contents.keys):
            base.clear(holder)
        for key, value in zip(*contents, strict=True):
            base.__setitem__(holder, key, value)

    return write


def _read_items(base: Any) -> Callable[[Any], Contents]:
    return lambda holder: Contents(tuple(base.keys(holder)), tuple(base.values(holder)))


def _matches_items(items: dict[Any, Any], contents: Contents) -> bool:
    keys, values = contents
    if dict.__len__(items) != len(keys):
        return False
    return all(map(is_, dict.keys(items), keys)) and all(map(is_, dict.values(items), values))


def attributes_of(holder: object) -> dict[str, Any]:
    """Returns the attributes of an object, without running code of its class."""
    attributes: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    return attributes


def _matches_attributes(holder: object, contents: Contents) -> bool:
    attributes = object.__getattribute__(holder, "__dict__")
    if not contents.keys:  # Most functions have no attributes.
        return dict.__len__(attributes) == 0
    return _matches_items(attributes, contents)


def _read_cell(cell: types.CellType) -> Contents:
    try:
        return Contents((), (cell.cell_contents,))
    except ValueError:  # It is empty.
        return Contents((), ())


def _matches_cell(cell: types.CellType, contents: Contents) -> bool:
    try:
        return contents.values != () and cell.cell_contents is contents.values[0]
    except ValueError:  # It is empty.
        return False


def _write_cell(cell: types.CellType, contents: Contents) -> None:
    if contents.values:
        (cell.cell_contents,) = contents.values
    else:
        del cell.cell_contents


def _read_variable(holder: tuple[dict[str, Any], str]) -> Contents:
    variables, name = holder
    return Contents((), (variables[name],) if name in variables else ())


def _matches_variable(holder: tuple[dict[str, Any], str], contents: Contents) -> bool:
    variables, name = holder
    return contents.values != () and variables.get(name, contents) is contents.values[0]


def _write_variable(holder: tuple[dict[str, Any], str], contents: Contents) -> None:
    variables, name = holder
    if contents.values:
        (variables[name],) = contents.values
    else:
        variables.pop(name, None)


CODE = (types.FunctionType, staticmethod, classmethod, property, cached_property, partialmethod)


def _read_class(kind: type) -> Contents:
    """Reads the class attributes that hold data. Skips descriptors and names with double underscores."""
    data = {
        name: value
        for name, value in vars(kind).items()
        if type(value) is not types.FunctionType and not (name.startswith("__") and name.endswith("__"))
        if type(value) in ATOMS or (not hasattr(type(value), "__get__") and name != "_abc_impl")
    }
    return Contents(tuple(data), tuple(data.values()))


def _write_class(kind: type, contents: Contents) -> None:
    for name in set(_read_class(kind).keys) - set(contents.keys):
        type.__delattr__(kind, name)
    for name, value in zip(*contents, strict=True):
        if vars(kind).get(name) is not value:
            type.__setattr__(kind, name, value)


def slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Returns the slots of a class and its bases."""
    bases = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    return tuple(
        slot for base in bases for slot in vars(base).values() if isinstance(slot, types.MemberDescriptorType)
    )


def _read_slots(holder: object) -> Contents:
    filled = {}
    for slot in slots_of(type(holder)):
        with suppress(AttributeError):  # It is empty.
            filled[slot.__name__, slot] = slot.__get__(holder)
    return Contents(tuple(filled), tuple(filled.values()))


def _write_slots(holder: object, contents: Contents) -> None:
    for _, slot in set(_read_slots(holder).keys) - set(contents.keys):
        slot.__delete__(holder)
    for (_, slot), value in zip(*contents, strict=True):
        slot.__set__(holder, value)


def _write_set(holder: set[Any], contents: Contents) -> None:
    set.clear(holder)
    set.update(holder, contents.values)


def _write_deque(holder: deque[Any], contents: Contents) -> None:
    deque.clear(holder)
    deque.extend(holder, contents.values)


def _write_bytes(holder: Any, contents: Contents) -> None:
    (value,) = contents.values
    if isinstance(holder, bytearray):
        bytearray.__setitem__(holder, slice(None), value)
    else:
        array.array.__setitem__(holder, slice(None), array.array(holder.typecode, value))


def _write_stream(holder: Any, contents: Contents) -> None:
    value, position = contents.values
    holder.seek(0)
    holder.truncate()
    holder.write(value)
    holder.seek(position)


GENERATORS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], object]], ...] = (
    (
        torch.Generator,
        lambda generator: bytes(generator.get_state().numpy()),
        lambda generator, state: generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    (np.random.RandomState, lambda generator: generator.get_state(legacy=False), np.random.RandomState.set_state),
    (np.random.BitGenerator, attrgetter("state"), lambda generator, state: setattr(generator, "state", state)),
    (random.Random, random.Random.getstate, random.Random.setstate),
)
"""The classes of random generators, each with functions that read and write the state."""


def _read_generator(holder: Any) -> Contents:
    state = next(read(holder) for kind, read, _ in GENERATORS if isinstance(holder, kind))
    return Contents((_frozen(state),), (state,))


def _frozen(state: object) -> object:
    """Converts the state of a generator to a value that `==` can compare."""
    if isinstance(state, dict):
        return tuple((key, _frozen(value)) for key, value in state.items())
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _write_generator(holder: Any, contents: Contents) -> None:
    next(write(holder, *contents.values) for kind, _, write in GENERATORS if isinstance(holder, kind))


def read_tensor(tensor: Tensor) -> Contents:
    """Returns the memory, the gradient and the values of a tensor. The caller copies the values."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    keys = tensor.shape, strides, tensor.dtype, tensor.requires_grad
    return Contents(keys, (tensor.data, tensor.grad if tensor.is_leaf else None, tensor.data))


def _write_tensor(tensor: Tensor, contents: Contents) -> None:
    memory, gradient, values = contents.values
    if tensor.layout is not torch.strided:
        restore_values(tensor, values.clone())
    else:
        if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (memory.data_ptr(), memory.shape, memory.stride()):
            tensor.data = memory
        if not same_values(memory, values):
            with torch.inference_mode(memory.is_inference()):
                # This leaves the version of `tensor` alone, which a graph may have saved.
                unexpanded(memory).copy_(unexpanded(values))
    if tensor.is_leaf:
        tensor.requires_grad_(contents.keys[-1])
        if tensor.grad is not gradient:
            tensor.grad = gradient


def read_array(values: Any) -> Contents:
    """Returns the shape, the dtype and the values of a NumPy array. The caller copies the values."""
    return Contents((values.shape, values.dtype.str), (values,))


def _write_array(holder: Any, contents: Contents) -> None:
    np.copyto(holder, contents.values[0])


DICT = Kind(_read_items(dict), _write_items(dict), _matches_items)
ORDERED = Kind(_read_items(OrderedDict), _write_items(OrderedDict))
NAMED = replace(DICT, label=lambda key: f".{key}")  # A module's dict of submodules, parameters or buffers.
ATTRIBUTES = Kind(
    lambda holder: DICT.read(attributes_of(holder)),
    lambda holder, contents: DICT.write(attributes_of(holder), contents),
    _matches_attributes,
    lambda key: f".{key}",
)
EMPTY = Kind(  # A tuple of a module's dicts and sets that were empty, most of them for hooks.
    lambda holder: Contents((), tuple([container for container in holder if not container])),
    lambda holder, contents: [container.clear() for container in holder],
)
SLOTS = Kind(_read_slots, _write_slots, label=lambda key: f".{key[0]}")
CLASS = Kind(_read_class, _write_class, label=lambda key: f".{key}")
LIST = Kind(
    lambda holder: Contents((), tuple(list.__iter__(holder))),
    lambda holder, contents: list.__setitem__(holder, slice(None), contents.values),
)
SET = Kind(lambda holder: Contents((), tuple(set.__iter__(holder))), _write_set)
DEQUE = Kind(lambda holder: Contents((), tuple(deque.__iter__(holder))), _write_deque)
BYTES = Kind(lambda holder: Contents((), (bytes(holder),)), _write_bytes)
CELL = Kind(_read_cell, _write_cell, _matches_cell)
VARIABLE = Kind(_read_variable, _write_variable, _matches_variable)
GENERATOR = Kind(_read_generator, _write_generator)
STREAM = Kind(lambda stream: Contents((), (stream.getvalue(), stream.tell())), _write_stream)
TENSOR = Kind(read_tensor, _write_tensor)
ARRAY = Kind(read_array, _write_array)

CONTAINERS = ((OrderedDict, ORDERED), (dict, DICT), (list, LIST), (set, SET), (deque, DEQUE))


def same(a: object, b: object) -> bool:
    """Whether two values are the same object, or equal values of a type in `ATOMS`."""
    if a is b:
        return True
    if type(a) is not type(b) or type(a) not in ATOMS:
        return isinstance(a, tuple) and isinstance(b, tuple) and type(a) is type(b) is tuple and _all_same(a, b)
    return repr(a) == repr(b) if isinstance(a, (float, complex)) else a == b


def same_or_equal(a: object, b: object) -> bool:
    """Whether two values are the same object, or bitwise identical tensors on one device."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.device == b.device:
        return same_values(a.detach(), b.detach())
    return same(a, b)


def _all_same(these: tuple[Any, ...], those: tuple[Any, ...]) -> bool:
    return len(these) == len(those) and (all(map(is_, these, those)) or all(map(same, these, those)))


def _bits_of(tensor: Tensor) -> list[Tensor]:
    parts = [part.resolve_conj().resolve_neg() for part in strided_parts(tensor)]
    parts = [part.int_repr() if part.is_quantized else part for part in parts]
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    return [part.view(INTEGERS[part.itemsize]) if part.is_floating_point() else part for part in parts]


def same_values(these: Tensor, those: Tensor) -> bool:
    """Whether two tensors on one device are bitwise identical."""
    if any(getattr(these, name) != getattr(those, name) for name in ("shape", "dtype", "layout", "device")):
        return False
    return all(map(torch.equal, _bits_of(these), _bits_of(those)))


def differs(kind: Kind, was: Contents, now: Contents) -> bool:
    """Whether the contents of an object have changed from `was` to `now`."""
    if kind is TENSOR:
        (memory, gradient, values), (memory_now, gradient_now, values_now) = was.values, now.values
        moved = memory.layout is torch.strided and memory.data_ptr() != memory_now.data_ptr()
        return was.keys != now.keys or gradient is not gradient_now or moved or not same_values(values, values_now)
    if kind is ARRAY:
        return was.keys != now.keys or was.values[0].tobytes() != now.values[0].tobytes()
    if kind is GENERATOR:
        return was.keys != now.keys
    if kind is SET:
        return set(map(id, was.values)) != set(map(id, now.values)) and not _all_same(was.values, now.values)
    return not (_all_same(was.keys, now.keys) and _all_same(was.values, now.values))
