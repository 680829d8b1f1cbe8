"""Defines the manifest of a checkpoint: a JSON file that contains its own hash, so that reading detects any change.

Loading restores Python values exactly. Tensors are stored in separate files and referenced by name. A value that JSON
does not support is stored as an object with one key that starts with `$`.
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
LARGEST = 2**28  # bytes, enough for a million tensors with optimizer state

MAX_LISTED = 5  # names in one message
NO_HASH = "0" * 64

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class CheckpointError(ValueError):
    """Raised if a checkpoint is missing or damaged, or does not fit the model or optimizer. Nothing was changed.

    `path` and `findings` are also attributes.

    Args:
        path: The path of the checkpoint, or of a folder without checkpoints.
        findings: All reasons, each with a fix.
        advice: A last line for the message. Default: no such line.

    >>> import gpipe, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         gpipe.load(folder)
    ...     except gpipe.CheckpointError as error:
    ...         print(*error.findings)
    The folder has no checkpoint. Pass the folder that you passed to gpipe.save. [checkpoint-not-found]
    """

    def __init__(self, path: Path, findings: Sequence[str], advice: str = "") -> None:
        lines = [f"{path} cannot be loaded. Nothing was changed.", *(f"- {finding}" for finding in findings)]
        super().__init__("\n".join([*lines, advice] if advice else lines))
        self.path = path
        self.findings = list(findings)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self.args), vars(self)


class Group(TypedDict):
    """A parameter group of an optimizer."""

    parameters: list[str]
    options: dict[str, Any]


class Optimizer(TypedDict):
    """The type of an optimizer, its parameter groups, and its state for each parameter."""

    type: str
    groups: list[Group]
    state: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest. Reading a manifest checks these types. `Any` matches any JSON value."""

    step_number: int
    seed: int
    world: int  # number of processes that wrote it
    plan: dict[str, Any]  # plan of the pipe, as JSON
    files: dict[str, File]
    names: list[str]  # all tensors of the state_dict, each parameter once, by its first name
    ties: dict[str, str]  # other names of shared parameters, with their first name
    values: dict[str, Any]  # values of the state_dict that are not tensors
    optimizer: Optimizer | None
    extra: Any
    save_id: str = ""  # of a checkpoint in parts, and of later checkpoints in the same folder

    def first_name(self, name: str) -> str:
        """Returns the name under which a parameter is saved: the first name if the parameter is shared."""
        return self.ties.get(name, name)


TYPES = get_type_hints(Manifest)


def has_type(value: object, wanted: Any) -> bool:
    """Returns whether a JSON value matches a type annotation."""
    inner = get_args(wanted)
    if wanted is Any:
        return True
    if get_origin(wanted) is list:
        return isinstance(value, list) and all(has_type(item, inner[0]) for item in value)
    if get_origin(wanted) is dict:
        return isinstance(value, dict) and all(has_type(item, inner[1]) for item in value.values())
    if inner:
        return any(has_type(value, option) for option in inner)
    if fields := get_type_hints(wanted):
        return isinstance(value, dict) and all(key in value and has_type(value[key], fields[key]) for key in fields)
    return type(value) is wanted  # Unlike isinstance, this does not accept True as a number.


def to_bytes(manifest: Manifest) -> bytes:
    """Converts a manifest to the bytes of its file. gpipe shows the field `written_by` only in messages."""
    fields = {"format": FORMAT, "version": VERSION, "written_by": versions(), **asdict(manifest), "sha256": NO_HASH}
    blank = json.dumps(fields, indent=1, allow_nan=False)
    head, _, tail = blank.rpartition(NO_HASH)
    return (head + hashlib.sha256(blank.encode()).hexdigest() + tail).encode()


def from_bytes(data: bytes) -> Manifest:
    """Converts the bytes of a file to a manifest.

    Raises:
        ValueError: If the bytes are damaged, or if the format version or the type of a field is wrong.
    """
    try:
        fields = json.loads(data.decode())
        head, digest, tail = data.rpartition(fields["sha256"].encode())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("is damaged: it is not valid JSON") from None
    if not digest or hashlib.sha256(head + NO_HASH.encode() + tail).hexdigest() != fields["sha256"]:
        raise ValueError("is damaged: it has a different SHA-256")
    fields.setdefault("save_id", "")
    if fields.get("format") != FORMAT or fields.get("version") != VERSION:
        raise ValueError(
            f"has format {fields.get('format')!r}, version {fields.get('version')!r}, but this gpipe reads "
            f"{FORMAT!r}, version {VERSION}. Use the versions that wrote it: {fields.get('written_by')}"
        )
    wrong = [name for name, wanted in TYPES.items() if name not in fields or not has_type(fields[name], wanted)]
    if wrong:
        raise ValueError(f"has wrong types in {', '.join(wrong)}")
    if not (0 <= fields["step_number"] < 2**63 and -(2**63) <= fields["seed"] < 2**63):
        raise ValueError(f"has step_number={fields['step_number']} and seed={fields['seed']}, which are out of range")
    return Manifest(**{name: fields[name] for name in TYPES})


ADVICE = "Convert it to tensors, numbers, strings, None, or lists, tuples and dicts of these."


@dataclass(frozen=True)
class Encoder:
    """Converts values to JSON. Adds a message to `mistakes` for each value that cannot be converted."""

    keep: Callable[[str, Tensor], str]  # Stores the tensor of a place, and returns the name under which it is stored.
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
                return [self(item, f"{where}[{index}]") for index, item in enumerate(value)]
            case tuple() if type(value) is tuple:
                return {"$tuple": self(list(value), where)}
            case Counter():
                return {"$counter": self._pairs(value, where)}
            case dict():
                if all(isinstance(key, str) and not key.startswith("$") for key in value):
                    return {key: self(item, f"{where}[{key!r}]") for key, item in value.items()}
                return {"$dict": self._pairs(value, where)}
        self.mistakes.append(f"{where} has type {type(value).__qualname__}. {ADVICE}")
        return None

    def _pairs(self, value: Mapping[Any, object], where: str) -> Json:
        return [[self(key, f"a key of {where}"), self(item, f"{where}[{key!r}]")] for key, item in value.items()]

    def _tensor(self, tensor: Tensor, where: str) -> Json:
        if wrong := why_not_storable(tensor):
            self.mistakes.append(f"{where} {wrong}.")
            return None
        if not tensor.dim() and not tensor.is_complex():
            number = tensor.item()
            if math.isfinite(number):  # Small numbers, such as the step count of Adam, are stored in the manifest.
                return {"$scalar": [DTYPE_NAMES[tensor.dtype], number]}
        return {"$tensor": self.keep(where, tensor)}


def decode(value: Any, read: Callable[[str], Tensor]) -> object:
    """Converts JSON that an `Encoder` returned back to the original value.

    Args:
        value: The JSON value.
        read: A function that returns the tensor with a name.

    Raises:
        ValueError: If an `Encoder` never returns this JSON.
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
            return Counter({decode(key, read): decode(item, read) for key, item in pairs})
        case {"$dict": list(pairs)}:
            return {decode(key, read): decode(item, read) for key, item in pairs}
        case dict() if not any(key.startswith("$") for key in value):
            return {key: decode(item, read) for key, item in value.items()}
        case dict():
            raise ValueError(f"{value} is not a valid encoding")
    return value
