"""The manifest: what belongs to a checkpoint. It holds its own hash, so that no byte of it can change unseen."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gpipe.checkpoint.files import File
from gpipe.checkpoint.values import Json

NAME = "manifest.json"
FORMAT = "gpipe checkpoint"
VERSION = 1
LARGEST = 2**28  # bytes of the file: a million tensors and their optimizer

NO_HASH = "0" * 64


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
    files = {name: File(**{key: file[key] for key in ("bytes", "sha256")}) for name, file in fields["files"].items()}
    return Manifest(**{name: fields[name] for name in KINDS} | {"files": files})
