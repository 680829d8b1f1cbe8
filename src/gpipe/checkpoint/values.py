"""Python values as JSON and back, the same to the last bit; tensors stand beside, under names.

What JSON has no word for is an object with one key that begins with `$`.
"""

import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpipe.checkpoint.tensors import DTYPES, NAMES, why_not_storable

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Keep: TypeAlias = Callable[[str, Tensor], str]
"""Is handed a tensor, and where it was found, and gives the name under which it keeps it."""

ADVICE = "only tensors, numbers, text, None, and lists, tuples and dicts of them can be stored; convert it"


class Encoder:
    """Turns values into JSON, and collects what cannot be."""

    def __init__(self, keep: Keep) -> None:
        self.mistakes: list[str] = []
        self._keep = keep

    def __call__(self, value: object, where: str) -> Json:
        """The JSON of a value; `where` is what messages call it."""
        match value:
            case None | bool() | str():
                return value
            case int():
                return int(value)
            case float():
                return float(value) if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
            case Tensor():
                return self._tensor(value, where)
            case list():
                return [self(item, f"{where}[{at}]") for at, item in enumerate(value)]
            case tuple() if type(value) is tuple:
                return {"$tuple": [self(item, f"{where}[{at}]") for at, item in enumerate(value)]}
            case Counter():
                return {"$counter": self._pairs(value, where)}
            case dict():
                if all(isinstance(key, str) and not key.startswith("$") for key in value):
                    return {key: self(item, f"{where}[{key!r}]") for key, item in value.items()}
                return {"$dict": self._pairs(value, where)}
        self.mistakes.append(f"{where} is of type {type(value).__qualname__}; {ADVICE}")
        return None

    def _pairs(self, value: Mapping[Any, object], where: str) -> Json:
        return [[self(key, f"{where}: a key"), self(item, f"{where}[{key!r}]")] for key, item in value.items()]

    def _tensor(self, tensor: Tensor, where: str) -> Json:
        wrong = why_not_storable(tensor)
        if wrong:
            self.mistakes.append(f"{where} {wrong}")
            return None
        if not tensor.dim() and not tensor.is_complex():
            number = tensor.item()
            if math.isfinite(number):  # a number like Adam's count of steps needs no place in a file
                return {"$scalar": [NAMES[tensor.dtype], number]}
        return {"$tensor": self._keep(where, tensor)}


def decode(value: Json, read: Callable[[str], Tensor]) -> object:
    """The value again.

    Args:
        value: What an `Encoder` made of it.
        read: Gives the tensor of a name.

    Raises:
        ValueError: No encoder makes that.

    >>> decode({"betas": {"$tuple": [0.9, 0.999]}, "best": {"$float": "7ff0000000000000"}}, read=None)
    {'betas': (0.9, 0.999), 'best': inf}
    """
    match value:
        case list():
            return [decode(item, read) for item in value]
        case {"$tensor": str(name)}:
            return read(name)
        case {"$scalar": [str(dtype), bool() | int() | float() as number]} if dtype in DTYPES:
            return torch.tensor(number, dtype=DTYPES[dtype], device="cpu")
        case {"$float": str(bits)} if re.fullmatch("[0-9a-f]{16}", bits):
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case {"$tuple": list(items)}:
            return tuple(decode(item, read) for item in items)
        case {"$counter": list(pairs)}:
            return Counter(dict(_pairs(pairs, read)))
        case {"$dict": list(pairs)}:
            return dict(_pairs(pairs, read))
        case dict() if not any(key.startswith("$") for key in value):
            return {key: decode(item, read) for key, item in value.items()}
        case dict():
            raise ValueError(f"there is no value that is written as {value}")
    return value


def _pairs(pairs: list[Json], read: Callable[[str], Tensor]) -> Iterator[tuple[object, object]]:
    for pair in pairs:
        match pair:
            case [key, item]:
                yield decode(key, read), decode(item, read)
            case _:
                raise ValueError(f"there is no key and value that are written as {pair}")


def tensor_names(value: Json) -> list[str]:
    """The names of all tensors that a value needs."""
    names: list[str] = []

    def note(name: str) -> Tensor:
        names.append(name)
        return torch.empty(0)

    decode(value, note)
    return names
