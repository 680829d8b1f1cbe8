"""Looks for damage: whether a folder holds what its manifest says, to the last byte, and nothing else."""

import hashlib
import re
from pathlib import Path

from gpipe.checkpoint.files import File, hash_file, read_small, size_of, why_not_plain
from gpipe.checkpoint.folder import Found, age
from gpipe.checkpoint.manifest import LARGEST, MANIFEST, Manifest, from_bytes

FILE = re.compile(r"(?:stage_[0-9]+(?:\.(?:values|optimizer))?|extra)\.safetensors")
"""The names that files may have: none of them leads out of the folder."""


def read_manifest(found: Found) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ValueError: It is damaged, or not that of this folder.
    """
    path = found.path / MANIFEST
    wrong = why_not_plain(path)
    if wrong:
        raise ValueError(f"{MANIFEST} {wrong}")
    try:
        data = read_small(path, LARGEST)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} {error}") from None
    if found.sha256 not in (None, hashlib.sha256(data).hexdigest()):
        raise ValueError(f"{MANIFEST} is not the one that `latest` was written for; one of them is damaged")
    try:
        manifest = from_bytes(data)
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from None
    order = age(found.path.name)
    if order and order[0] != manifest.step_number:
        raise ValueError(f"{found.path.name} is of step {manifest.step_number}; give it its name back")
    return manifest


def find_damage(path: Path, manifest: Manifest, *, turn: int, turns: int) -> list[str]:
    """What is wrong with the files of a checkpoint.

    Args:
        path: Its folder.
        manifest: What it must hold.
        turn: Which of the files are read through here: one after each `turns`.
        turns: How many ranks share that.
    """
    leading_out = sorted(name for name in manifest.files if not FILE.fullmatch(name))
    findings = [
        f"{MANIFEST} names {name!r}, which is no file of a checkpoint; do not trust it" for name in leading_out
    ]
    there, wanted = {entry.name for entry in path.iterdir()}, {MANIFEST, *manifest.files} - set(leading_out)
    findings += [f"{name} is missing" for name in sorted(wanted - there)]
    findings += [f"{name} does not belong here; move it away" for name in sorted(there - wanted)]
    for at, name in enumerate(sorted(wanted & there - {MANIFEST})):
        wrong = why_not_plain(path / name)
        if wrong is None and size_of(path / name) not in {file.bytes for file in manifest.files.values()}:
            wrong = _why_other(File(size_of(path / name), ""), manifest.files[name], manifest.files)  # unread
        elif wrong is None and at % turns == turn:
            wrong = _why_other(hash_file(path / name), manifest.files[name], manifest.files)
        if wrong:
            findings.append(f"{name} {wrong}")
    return findings


def _why_other(found: File, written: File, files: dict[str, File]) -> str | None:
    if found == written:
        return None
    twins = [name for name, file in files.items() if file == found]
    if twins:
        return f"holds what belongs into {twins[0]}; rename it"
    if found.bytes != written.bytes:
        return f"has {found.bytes} bytes, and {written.bytes} were written: it is cut off, or of another checkpoint"
    return "is damaged, or of another checkpoint: its bytes are not those that were written (SHA-256)"
