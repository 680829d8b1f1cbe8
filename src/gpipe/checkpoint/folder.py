"""Manages the folder of a run: finds, publishes and removes checkpoints, and checks their files."""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import uuid
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from gpipe.checkpoint.files import (
    make_folder,
    open_regular_file,
    put_file,
    read_small_file,
    remove_folder,
    sync_folder,
)
from gpipe.checkpoint.manifest import LARGEST, MANIFEST, CheckpointError, Manifest, from_bytes

LATEST = "latest"
MAX_LATEST = 4096  # bytes of the file `latest`
CHECKPOINT = re.compile(r"step_(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?")
PART = re.compile(r"part_([0-9]+)-of-([0-9]+)\.([0-9a-f]{16})\.json")
LEFTOVER = re.compile(r"step_[0-9.]+\.tmp-([0-9a-f]{8})-[0-9a-f]{8}")


class CheckpointPath(NamedTuple):
    """The folder of a checkpoint, and the expected hash of its manifest, or None if the hash is unknown."""

    path: Path
    sha256: str | None = None


def order_of(name: str) -> tuple[int, int] | None:
    """Returns the step number of a checkpoint and its index within the step, or None if it is not a checkpoint."""
    matched = CHECKPOINT.fullmatch(name)
    return (int(matched[1]), int(matched[2] or 1)) if matched else None


def checkpoints(folder: Path) -> list[Path]:
    """Returns the paths of all checkpoints with a manifest in a folder, ordered by step."""
    known = {path: order_of(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    there = (path for path, order in known.items() if order and (path / MANIFEST).exists())
    return sorted(there, key=lambda path: known[path] or ())


def find(folder: Path) -> CheckpointPath | None:
    """Returns the folder itself if it is a checkpoint, otherwise the checkpoint named in its file `latest`."""
    if (folder / MANIFEST).exists():
        return CheckpointPath(folder)
    if folder.is_file():
        raise CheckpointError(
            folder, ["This is a file. Pass the folder that you passed to gpipe.save. [checkpoint-not-found]"]
        )
    there = checkpoints(folder)
    if not os.path.lexists(folder / LATEST):  # A process was killed just after it named its first checkpoint.
        return CheckpointPath(there[-1]) if there else None
    choice = f" Or load one of these checkpoints: {', '.join(map(str, there))}." if there else ""
    try:
        text = read_small_file(folder / LATEST, MAX_LATEST).decode(errors="replace")
    except ValueError as error:
        raise CheckpointError(folder, [f"{LATEST} {error}. Remove it.{choice} [latest-damaged]"]) from None
    matched = re.fullmatch(rf"({CHECKPOINT.pattern})\n(?:([0-9a-f]{{64}})\n)?", text)
    if not matched:
        advice = f"Replace it by the name of a checkpoint and a line break.{choice}"
        raise CheckpointError(folder, [f"{LATEST} is damaged: it contains {text[:200]!r}. {advice} [latest-damaged]"])
    checkpoint = CheckpointPath(folder / matched[1], matched[4])
    if not checkpoint.path.is_dir():
        raise CheckpointError(
            folder, [f"{LATEST} names {matched[1]}, which does not exist.{choice} [latest-damaged]"]
        )
    return checkpoint


# Writing. The writing process holds a lock on the temporary folder until the process ends. A temporary folder of this
# machine without a lock is a leftover. Folders of other machines stay, because their locks are not visible here.


class Draft(NamedTuple):
    """The temporary folder of a checkpoint that is being written, and the descriptor of its lock."""

    path: Path
    lock: int

    def end(self) -> None:
        """Releases the lock, and removes the folder if it has not been renamed. Must be called once."""
        os.close(self.lock)
        if self.path.exists():
            remove_folder(self.path)


def begin(folder: Path, step_number: int) -> Draft:
    """Creates and locks the temporary folder of a checkpoint. Raises a ValueError if `folder` is a checkpoint."""
    if (folder / MANIFEST).exists():
        raise ValueError(f"folder: {folder} is a checkpoint itself. Save to {folder.parent}.")
    make_folder(folder)
    while True:
        path = temporary_path(folder, f"step_{step_number}")
        os.mkdir(path)
        try:
            held, _ = lock(path, fcntl.LOCK_EX)
        except FileNotFoundError:
            continue  # A different job has removed it as a leftover.
        except OSError:
            os.rmdir(path)
            raise
        if path.exists():
            return Draft(path, held)
        os.close(held)  # It was removed as a leftover before it was locked.


def temporary_path(folder: Path, name: str) -> Path:
    """Returns an unused name for a folder that is not, or no longer, a complete checkpoint."""
    return folder / f"{name}.tmp-{_machine()}-{secrets.token_hex(4)}"


def _machine() -> str:
    """Returns an identifier of this machine, which changes at each boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    running = boot.read_bytes() if boot.exists() else str(uuid.getnode()).encode()
    return hashlib.sha256(running).hexdigest()[:8]


def lock(path: Path, how: int) -> tuple[int, bool]:
    """Opens and locks a file or folder.

    Returns:
        The descriptor, and whether it is locked. False if the file system does not support locks.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, how)
    except OSError:
        return handle, False
    return handle, True


def clear_leftovers(folder: Path) -> None:
    """Removes the temporary folders of processes on this machine that were killed while they saved."""
    for path in sorted(folder.iterdir()):
        matched = LEFTOVER.fullmatch(path.name)
        if matched and matched[1] == _machine():
            with suppress(OSError):  # The folder may have been renamed in the meantime.
                held, is_left = lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_left:
                    remove_folder(path)
                os.close(held)


def publish(draft: Draft, step_number: int, sha256: str) -> str:
    """Renames a complete checkpoint to an unused name, and writes this name to `latest`. Returns the name."""
    folder = draft.path.parent
    sync_folder(draft.path)
    for again in count(1):
        name = f"step_{step_number}" + (f".{again}" if again > 1 else "")
        try:
            os.rename(draft.path, folder / name)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    sync_folder(folder)
    temporary = folder / f"{LATEST}.{draft.path.name.rpartition('.')[2]}"
    put_file(folder / LATEST, temporary, f"{name}\n{sha256}\n".encode())
    sync_folder(folder)
    return name


def prune(folder: Path, keep: int, newest: str) -> None:
    """Keeps the checkpoint `newest` and the `keep - 1` checkpoints before it, and removes all older checkpoints.

    The checkpoint named in `latest` is never removed, because a different job may have written `latest`. Checkpoints
    with a larger step number belong to a different run and are not removed.
    """
    limit = order_of(newest)
    assert limit is not None
    past = [path for path in checkpoints(folder) if (order_of(path.name) or limit) <= limit]
    with suppress(CheckpointError):
        latest = find(folder)
        for path in past[:-keep]:
            if latest is not None and path != latest.path:
                doomed = temporary_path(folder, path.name)
                os.rename(path, doomed)  # A partly removed checkpoint must not have a final name.
                remove_folder(doomed)


FILE = re.compile(r"(?:stage_[0-9]+(?:\.(?:values|optimizer))?|extra)\.safetensors")
"""The allowed file names. Such a name cannot refer to a file outside the folder."""


def read_manifest(checkpoint: CheckpointPath) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
        ValueError: If the manifest is missing or damaged, or does not have the expected hash.
    """
    try:
        data = read_small_file(checkpoint.path / MANIFEST, LARGEST)
        if checkpoint.sha256 not in (None, hashlib.sha256(data).hexdigest()):
            raise ValueError("does not have the hash in `latest`. One of these files is damaged")
        return from_bytes(data)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} {error}.") from None


def find_damage(
    path: Path,
    manifest: Manifest,
    *,
    turn: int = 0,
    turns: int = 1,
    elsewhere: Mapping[str, Path] = MappingProxyType({}),
) -> list[str]:
    """Returns a message for each damaged file.

    All ranks check the sizes of all files. To share the work of hashing, rank `turn` hashes every `turns`-th file.
    `elsewhere` contains the paths of files that are in a different folder.
    """
    findings, cause = [], "The file is damaged, or from a different checkpoint."
    for index, (name, written) in enumerate(sorted(manifest.files.items())):
        if not FILE.fullmatch(name):
            findings.append(f"{MANIFEST} names {name!r}, which is not a checkpoint file. Do not trust it.")
            continue
        try:
            with open_regular_file(elsewhere.get(name, path / name)) as (file, size):
                if size != written["bytes"]:  # No need to read it.
                    findings.append(f"{name} has {size} bytes instead of {written['bytes']}. {cause}")
                elif index % turns == turn and hashlib.file_digest(file, "sha256").hexdigest() != written["sha256"]:
                    findings.append(f"{name} has a different SHA-256. {cause}")
        except ValueError as wrong:
            findings.append(f"{name} {wrong}.")
    return findings
