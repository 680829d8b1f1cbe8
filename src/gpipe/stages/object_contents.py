"""How the contents of each kind of mutable object are read, written and compared.

Each kind of object is read through its builtin base class (`dict.values(x)`, not `x.values()`), so no code of user
classes runs. Contents are written in place, so objects keep their identity.
"""

import array
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partialmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpipe.stages.digest import INTEGERS
from gpipe.stages.memory_layout import restore_values, strided_parts, unexpanded

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device})
"""Types without mutable state. Two values of one of these types are compared by value."""


class Contents(NamedTuple):
    """The contents of an object: values, and their keys if it has any."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


class Kind(NamedTuple):
    """How objects of one kind are read and written."""

    read: Callable[[Any], Contents]
    write: Callable[[Any, Contents], object]
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


def attributes_of(holder: object) -> dict[str, Any]:
    """Returns the attributes of an object, without running code of its class."""
    found: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    return found


def _read_cell(cell: types.CellType) -> Contents:
    try:
        return Contents((), (cell.cell_contents,))
    except ValueError:  # It is empty.
        return Contents((), ())


def _write_cell(cell: types.CellType, contents: Contents) -> None:
    if contents.values:
        (cell.cell_contents,) = contents.values
    else:
        del cell.cell_contents


def _read_variable(holder: tuple[dict[str, Any], str]) -> Contents:
    variables, name = holder
    return Contents((), (variables[name],) if name in variables else ())


def _write_variable(holder: tuple[dict[str, Any], str], contents: Contents) -> None:
    variables, name = holder
    if contents.values:
        (variables[name],) = contents.values
    else:
        variables.pop(name, None)


CODE = (types.FunctionType, staticmethod, classmethod, property, cached_property, partialmethod)


def _read_class(kind: type) -> Contents:
    data = {
        name: value
        for name, value in vars(kind).items()
        if not isinstance(value, CODE) and not (name.startswith("__") and name.endswith("__"))
        if not hasattr(type(value), "__get__") and name != "_abc_impl"
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


def _read_generator(holder: Any) -> Contents:
    match holder:
        case torch.Generator():
            state: Any = bytes(holder.get_state().numpy())
        case np.random.RandomState():
            state = holder.get_state(legacy=False)
        case np.random.Generator():
            state = holder.bit_generator.state
        case np.random.BitGenerator():
            state = holder.state
        case _:
            state = random.Random.getstate(holder)
    return Contents((_frozen(state),), (state,))


def _frozen(state: object) -> object:
    """A state of a generator as a value that `==` compares."""
    if isinstance(state, dict):
        return tuple((key, _frozen(value)) for key, value in state.items())
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _write_generator(holder: Any, contents: Contents) -> None:
    (state,) = contents.values
    match holder:
        case torch.Generator():
            holder.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        case np.random.RandomState():
            holder.set_state(state)
        case np.random.Generator():
            holder.bit_generator.state = state
        case np.random.BitGenerator():
            holder.state = state
        case _:
            random.Random.setstate(holder, state)


def read_tensor(tensor: Tensor) -> Contents:
    """Returns references to the memory and the gradient, and the values, which the walk copies."""
    lies = (
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else (),
        tensor.dtype,
        tensor.requires_grad,
    )
    return Contents(lies, (tensor.data, tensor.grad if tensor.is_leaf else None, tensor.data))


def _write_tensor(tensor: Tensor, contents: Contents) -> None:
    memory, gradient, values = contents.values
    if tensor.layout is not torch.strided:
        restore_values(tensor, values.clone())
    else:
        if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (memory.data_ptr(), memory.shape, memory.stride()):
            tensor.data = memory
        if not same_values(memory, values):
            with torch.inference_mode(memory.is_inference()):
                unexpanded(memory).copy_(unexpanded(values))  # does not change the version of the tensor
    if tensor.is_leaf:
        tensor.requires_grad_(contents.keys[-1])
        if tensor.grad is not gradient:
            tensor.grad = gradient


def read_array(held: Any) -> Contents:
    """Returns the shape, the dtype, and the array itself, which the walk copies."""
    return Contents((held.shape, held.dtype.str), (held,))


def _write_array(held: Any, contents: Contents) -> None:
    np.copyto(held, contents.values[0])


DICT = Kind(_read_items(dict), _write_items(dict))
ORDERED = Kind(_read_items(OrderedDict), _write_items(OrderedDict))
NAMED = DICT._replace(label=lambda key: f".{key}")  # of a module: its parts, parameters and buffers
ATTRIBUTES = Kind(
    lambda holder: DICT.read(attributes_of(holder)),
    lambda holder, contents: DICT.write(attributes_of(holder), contents),
    lambda key: f".{key}",
)
EMPTY = Kind(  # of a module: its dicts and sets that are empty, most of them for hooks
    lambda holder: Contents((), tuple(held for held in holder if not held)),
    lambda holder, contents: [held.clear() for held in holder],
)
SLOTS = Kind(_read_slots, _write_slots, lambda key: f".{key[0]}")
CLASS = Kind(_read_class, _write_class, lambda key: f".{key}")
LIST = Kind(
    lambda holder: Contents((), tuple(list.__iter__(holder))),
    lambda holder, contents: list.__setitem__(holder, slice(None), contents.values),
)
SET = Kind(lambda holder: Contents((), tuple(set.__iter__(holder))), _write_set)
DEQUE = Kind(lambda holder: Contents((), tuple(deque.__iter__(holder))), _write_deque)
BYTES = Kind(lambda holder: Contents((), (bytes(holder),)), _write_bytes)
CELL = Kind(_read_cell, _write_cell)
VARIABLE = Kind(_read_variable, _write_variable)
GENERATOR = Kind(_read_generator, _write_generator)
STREAM = Kind(lambda stream: Contents((), (stream.getvalue(), stream.tell())), _write_stream)
TENSOR = Kind(read_tensor, _write_tensor)
ARRAY = Kind(read_array, _write_array)

CONTAINERS = ((OrderedDict, ORDERED), (dict, DICT), (list, LIST), (set, SET), (deque, DEQUE))


def same(a: object, b: object) -> bool:
    """Whether two values are one object, or equal numbers, strings or dtypes."""
    if a is b:
        return True
    if type(a) is not type(b) or type(a) not in ATOMS:
        return isinstance(a, tuple) and isinstance(b, tuple) and type(a) is type(b) is tuple and _all_same(a, b)
    return repr(a) == repr(b) if isinstance(a, (float, complex)) else a == b


def same_or_equal(a: object, b: object) -> bool:
    """Whether two values are the same, or tensors with the same bits."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.device == b.device:
        return same_values(a.detach(), b.detach())
    return same(a, b)


def _all_same(these: tuple[Any, ...], those: tuple[Any, ...]) -> bool:
    return len(these) == len(those) and all(map(same, these, those))


def _bits_of(tensor: Tensor) -> list[Tensor]:
    parts = [part.resolve_conj().resolve_neg() for part in strided_parts(tensor)]
    parts = [part.int_repr() if part.is_quantized else part for part in parts]
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    return [part.view(INTEGERS[part.itemsize]) if part.is_floating_point() else part for part in parts]


def same_values(these: Tensor, those: Tensor) -> bool:
    """Whether tensors have the same bits."""
    if any(getattr(these, name) != getattr(those, name) for name in ("shape", "dtype", "layout", "device")):
        return False
    return all(map(torch.equal, _bits_of(these), _bits_of(those)))


def differs(kind: Kind, was: Contents, now: Contents) -> bool:
    """Whether the contents of one object at two moments differ."""
    if kind is TENSOR:
        (memory, gradient, values), (memory_now, gradient_now, values_now) = was.values, now.values
        moved = memory.layout is torch.strided and memory.data_ptr() != memory_now.data_ptr()
        apart = was.keys != now.keys or gradient is not gradient_now or moved
        return apart or not same_values(values, values_now)
    if kind is ARRAY:
        (before,), (held,) = was.values, now.values
        return was.keys != now.keys or (before.tobytes() != held.tobytes())
    if kind is GENERATOR:
        return was.keys != now.keys
    if kind is SET:
        return set(map(id, was.values)) != set(map(id, now.values)) and not _all_same(was.values, now.values)
    return not (_all_same(was.keys, now.keys) and _all_same(was.values, now.values))
