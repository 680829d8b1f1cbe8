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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpipe.checkpoint.files import DTYPE_NAMES, DTYPES, File, why_not_storable

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


@dataclass(frozen=True)
class Manifest:
    """What belongs to a checkpoint."""

    step_number: int
    seed: int
    world: int  # processes that wrote it
    layers_per_partition: list[int]
    micro_batches: int
    files: dict[str, File]
    names: list[str]  # of all tensors of the state_dict, each parameter once, under its first name
    ties: dict[str, str]  # the other names of shared parameters
    values: dict[str, Json]  # what is no tensor in the state_dict
    optimizer: (
        dict[str, Any] | None
    )  # {"type", "groups": [{"parameters", "options"}], "state": {parameter: {key: _}}}
    extra: Json


Kind: TypeAlias = "type | tuple[Kind, ...] | list[Kind] | dict[str, Kind]"
ANYTHING = (dict, list, str, int, float, bool, type(None))
OPTIMIZER: Kind = {
    "type": str,
    "groups": [{"parameters": [str], "options": {"*": ANYTHING}}],
    "state": {"*": {"*": ANYTHING}},
}
KINDS: dict[str, Kind] = {
    "step_number": int,
    "seed": int,
    "world": int,
    "layers_per_partition": [int],
    "micro_batches": int,
    "files": {"*": {"bytes": int, "sha256": str}},
    "names": [str],
    "ties": {"*": str},
    "values": {"*": ANYTHING},
    "optimizer": (OPTIMIZER, type(None)),
    "extra": ANYTHING,
}
"""What each field is: a type, one of several, a list of, a dict with these keys or, under `*`, with any."""


def is_kind(value: object, kind: Kind) -> bool:
    """Whether JSON is of a kind.

    >>> is_kind([{"bytes": 3}], [{"bytes": int}]), is_kind({"bytes": True}, {"*": int})
    (True, False)
    """
    match kind:
        case type():
            return type(value) is kind  # True is no number here
        case tuple():
            return any(is_kind(value, one) for one in kind)
        case list():
            return isinstance(value, list) and all(is_kind(item, kind[0]) for item in value)
        case {"*": every}:
            return isinstance(value, dict) and all(is_kind(item, every) for item in value.values())
    return isinstance(value, dict) and all(key in value and is_kind(value[key], kind[key]) for key in kind)


def to_bytes(manifest: Manifest, versions: dict[str, str]) -> bytes:
    """The manifest as it is written; `versions` of software is for people who look into it."""
    fields = {"format": FORMAT, "version": VERSION, "written_by": versions, **asdict(manifest), "sha256": NO_HASH}
    blank = json.dumps(fields, indent=1, allow_nan=False)
    head, _, tail = blank.rpartition(NO_HASH)
    return (head + hashlib.sha256(blank.encode()).hexdigest() + tail).encode()


def from_bytes(data: bytes) -> Manifest:
    """The manifest that was written.

    Raises:
        ValueError: It is damaged, or of another version.
    """
    try:
        fields = json.loads(data.decode())
        head, found, tail = data.rpartition(fields["sha256"].encode())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is damaged: not the JSON that was written") from None
    if not found or hashlib.sha256(head + NO_HASH.encode() + tail).hexdigest() != fields["sha256"]:
        raise ValueError("it is damaged: its bytes are not those that were written (SHA-256)")
    if fields.get("format") != FORMAT or fields.get("version") != VERSION:
        raise ValueError(
            f"it is of format {fields.get('format')!r}, version {fields.get('version')!r}, and this gpipe reads "
            f"{FORMAT!r}, version {VERSION}; use the gpipe that wrote it: {fields.get('written_by')}"
        )
    wrong = [name for name, kind in KINDS.items() if not is_kind(fields.get(name, ...), kind)]
    if wrong:
        raise ValueError(f"its {', '.join(wrong)} cannot be understood; it was not written by gpipe.save")
    if odd := _contradictions(fields):
        raise ValueError(f"it contradicts itself: {'; '.join(odd)}; it was not written by gpipe.save")
    files = {name: File(**{key: file[key] for key in ("bytes", "sha256")}) for name, file in fields["files"].items()}
    return Manifest(**{name: fields[name] for name in KINDS} | {"files": files})


def _contradictions(fields: Mapping[str, Any]) -> list[str]:
    """What is of the right types and yet cannot be, in a manifest that somebody else made."""
    names, ties, values = fields["names"], fields["ties"], fields["values"]
    groups = fields["optimizer"]["groups"] if fields["optimizer"] else []
    state = fields["optimizer"]["state"] if fields["optimizer"] else {}
    trained = [name for group in groups for name in group["parameters"]]
    small = [name for name in ("world", "micro_batches") if fields[name] < 1]
    small += ["step_number"] * (fields["step_number"] < 0)
    small += ["layers_per_partition"] * (min(fields["layers_per_partition"], default=0) < 1)
    small += [f"the bytes of {name}" for name, file in fields["files"].items() if file["bytes"] < 0]
    found = {
        "too small": small,
        "not of 64 bits": ["seed"] * (not -(2**63) <= fields["seed"] < 2**63),
        "named twice": [name for name, times in Counter(names).items() if times > 1],
        "tensor and value": [name for name in values if name in set(names)],
        "tied to no tensor": [name for name, first in ties.items() if first not in set(names) or name in set(names)],
        "trained twice": [name for name, times in Counter(trained).items() if times > 1],
        "trained, and no tensor": [name for name in trained if name not in set(names)],
        "remembered, and not trained": [name for name in state if name not in set(trained)],
    }
    return [
        f"{', '.join(odd[:SOME])} {'is' if len(odd) == 1 else 'are'} {what}" for what, odd in found.items() if odd
    ]


Keep: TypeAlias = Callable[[str, Tensor], str]
"""Is handed a tensor, and where it was found, and gives the name under which it keeps it."""

LONGEST_INTEGER = 14_000  # bits; Python reads no text of more than 4,300 digits as a number
ADVICE = "only tensors, numbers, text, None, and lists, tuples and dicts of them can be stored; convert it"


class Encoder:
    """Turns values into JSON, and collects what cannot be."""

    def __init__(self, keep: Keep) -> None:
        self.mistakes: list[str] = []
        self._keep = keep

    def __call__(self, value: object, where: str) -> Json:
        """The JSON of a value; `where` is what messages call it."""
        try:
            return self._encoded(value, where)
        except RecursionError:
            self.mistakes.append(f"{where} contains itself, or is nested too deeply; flatten it")
            return None

    def _encoded(self, value: object, where: str) -> Json:
        match value:
            case None | bool() | str():
                return value
            case int() if value.bit_length() <= LONGEST_INTEGER:
                return int(value)
            case int():
                self.mistakes.append(
                    f"{where} is a whole number of {value.bit_length()} bits; store it as a tensor or text"
                )
                return None
            case float():
                return float(value) if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
            case Tensor():
                return self._tensor(value, where)
            case list():
                return [self._encoded(item, f"{where}[{at}]") for at, item in enumerate(value)]
            case tuple() if type(value) is tuple:
                return {"$tuple": [self._encoded(item, f"{where}[{at}]") for at, item in enumerate(value)]}
            case Counter():
                return {"$counter": self._pairs(value, where)}
            case dict():
                if all(isinstance(key, str) and not key.startswith("$") for key in value):
                    return {key: self._encoded(item, f"{where}[{key!r}]") for key, item in value.items()}
                return {"$dict": self._pairs(value, where)}
        self.mistakes.append(f"{where} is of type {type(value).__qualname__}; {ADVICE}")
        return None

    def _pairs(self, value: Mapping[Any, object], where: str) -> Json:
        return [
            [self._encoded(key, f"{where}: a key"), self._encoded(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]

    def _tensor(self, tensor: Tensor, where: str) -> Json:
        wrong = why_not_storable(tensor)
        if wrong:
            self.mistakes.append(f"{where} {wrong}")
            return None
        if not tensor.dim() and not tensor.is_complex():
            number = tensor.item()
            if math.isfinite(number):  # a number like Adam's count of steps needs no place in a file
                return {"$scalar": [DTYPE_NAMES[tensor.dtype], number]}
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
