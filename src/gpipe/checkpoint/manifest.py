"""The manifest: what belongs to a checkpoint, in JSON. It holds its own hash, so that no byte can change unseen.

Python values in it are the same again to the last bit; tensors stand beside, under names. What JSON has no word for
is an object with one key that begins with `$`.
"""

import hashlib
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from gpipe.checkpoint.files import DTYPE_NAMES, DTYPES, File, why_not_storable
from gpipe.distributed.communicator import versions
from gpipe.errors import rebuild

MANIFEST = "manifest.json"
FORMAT = "gpipe checkpoint"
VERSION = 1
LARGEST = 2**28  # bytes of the file: a million tensors and their optimizer

SOME = 5  # names that a message lists
NO_HASH = "0" * 64

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class CheckpointError(ValueError):
    """A checkpoint is damaged, or is not for this model or optimizer. Nothing was changed.

    Attributes:
        path: The checkpoint.
        findings: All that is wrong, each with what to do.

    >>> import gpipe, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         gpipe.load(folder)
    ...     except gpipe.CheckpointError as error:
    ...         print(*error.findings)
    there is no checkpoint here, neither manifest.json nor latest; save one, or give the folder that one was saved to
    """

    def __init__(self, path: Path, findings: Sequence[str], advice: str = "") -> None:
        lines = [f"{path} cannot be loaded, and nothing was changed:", *(f"- {finding}" for finding in findings)]
        super().__init__("\n".join([*lines, advice] if advice else lines))
        self.path = path
        self.findings = list(findings)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self.args), vars(self)


class Group(TypedDict):
    """Parameters that an optimizer trains by the same options."""

    parameters: list[str]
    options: dict[str, Any]


class Optimizer(TypedDict):
    """An optimizer, and what it remembers of each parameter."""

    type: str
    groups: list[Group]
    state: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Manifest:
    """What belongs to a checkpoint; what is read must be of these types, and Any is any JSON."""

    step_number: int
    seed: int
    world: int  # processes that wrote it
    plan: dict[str, Any]  # of the pipe, as JSON
    files: dict[str, File]
    names: list[str]  # of all tensors of the state_dict, each parameter once, under its first name
    ties: dict[str, str]  # the other names of shared parameters
    values: dict[str, Any]  # what is no tensor in the state_dict
    optimizer: Optimizer | None
    extra: Any


TYPES = get_type_hints(Manifest)


def is_of(value: object, wanted: Any) -> bool:
    """Whether JSON is of a type, as annotations have it."""
    inner = get_args(wanted)
    if wanted is Any:
        return True
    if get_origin(wanted) is list:
        return isinstance(value, list) and all(is_of(item, inner[0]) for item in value)
    if get_origin(wanted) is dict:
        return isinstance(value, dict) and all(is_of(item, inner[1]) for item in value.values())
    if inner:
        return any(is_of(value, one) for one in inner)
    if fields := get_type_hints(wanted):
        return isinstance(value, dict) and all(key in value and is_of(value[key], fields[key]) for key in fields)
    return type(value) is wanted  # True is no number here


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as it is written; who wrote it is for people who look into it."""
    fields = {"format": FORMAT, "version": VERSION, "written_by": versions(), **asdict(manifest), "sha256": NO_HASH}
    blank = json.dumps(fields, indent=1, allow_nan=False)
    head, _, tail = blank.rpartition(NO_HASH)
    return (head + hashlib.sha256(blank.encode()).hexdigest() + tail).encode()


def from_bytes(data: bytes) -> Manifest:
    """The manifest that was written; a ValueError says what is wrong with it."""
    try:
        fields = json.loads(data.decode())
        head, found, tail = data.rpartition(fields["sha256"].encode())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("is damaged: not the JSON that was written") from None
    if not found or hashlib.sha256(head + NO_HASH.encode() + tail).hexdigest() != fields["sha256"]:
        raise ValueError("is damaged: its bytes are not those that were written (SHA-256)")
    if fields.get("format") != FORMAT or fields.get("version") != VERSION:
        theirs = f"is of format {fields.get('format')!r}, version {fields.get('version')!r}"
        ours = f"this gpipe reads {FORMAT!r}, version {VERSION}"
        raise ValueError(f"{theirs}, and {ours}; use the gpipe that wrote it: {fields.get('written_by')}")
    wrong = [name for name, wanted in TYPES.items() if name not in fields or not is_of(fields[name], wanted)]
    if wrong:
        raise ValueError(f"has {', '.join(wrong)} of other types than gpipe.save writes")
    return Manifest(**{name: fields[name] for name in TYPES})


ADVICE = "only tensors, numbers, text, None, and lists, tuples and dicts of them can be stored; convert it"


@dataclass(frozen=True)
class Encoder:
    """Turns values into JSON, and adds to `mistakes` what cannot be."""

    keep: Callable[[str, Tensor], str]  # is told where a tensor was found, and gives the name under which it keeps it
    mistakes: list[str]

    def __call__(self, value: object, where: str) -> Json:
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
                return {"$tuple": self(list(value), where)}
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
        if wrong := why_not_storable(tensor):
            self.mistakes.append(f"{where} {wrong}")
            return None
        if not tensor.dim() and not tensor.is_complex():
            number = tensor.item()
            if math.isfinite(number):  # a number like Adam's count of steps needs no place in a file
                return {"$scalar": [DTYPE_NAMES[tensor.dtype], number]}
        return {"$tensor": self.keep(where, tensor)}


def decode(value: Any, read: Callable[[str], Tensor]) -> object:
    """The value that an `Encoder` made JSON of, ValueError if of none; `read` gives the tensor of a name."""
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
            return Counter({decode(key, read): decode(item, read) for key, item in pairs})
        case {"$dict": list(pairs)}:
            return {decode(key, read): decode(item, read) for key, item in pairs}
        case dict() if not any(key.startswith("$") for key in value):
            return {key: decode(item, read) for key, item in value.items()}
        case dict():
            raise ValueError(f"there is no value that is written as {value}")
    return value
