"""The folder of a run: its checkpoints by name, which is the latest, what may be removed, and what is damaged."""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import uuid
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from gpipe.checkpoint.files import make_folder, put_file, read_small, reading, remove_folder, sync_folder
from gpipe.checkpoint.manifest import LARGEST, MANIFEST, CheckpointError, Manifest, from_bytes

LATEST = "latest"
LONGEST = 4096  # bytes of it
CHECKPOINT = re.compile(r"step_(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?")
LEFTOVER = re.compile(r"step_[0-9.]+\.tmp-([0-9a-f]{8})-[0-9a-f]{8}")


class Found(NamedTuple):
    """A checkpoint, and the hash that its manifest must have, if that is known."""

    path: Path
    sha256: str | None = None


def age(name: str) -> tuple[int, int] | None:
    """What checkpoints are ordered by: the step, and which one of that step it is; None if it is none."""
    matched = CHECKPOINT.fullmatch(name)
    return (int(matched[1]), int(matched[2] or 1)) if matched else None


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a folder, oldest first."""
    known = {path: age(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    return sorted((path for path, order in known.items() if order), key=lambda path: known[path] or ())


def find(folder: Path) -> Found | None:
    """The checkpoint that a folder is, or that its `latest` names."""
    if (folder / MANIFEST).exists():
        return Found(folder)
    if folder.is_file():
        raise CheckpointError(folder, ["this is a file; give the folder that gpipe.save was given, or a checkpoint"])
    there = checkpoints(folder)
    if not os.path.lexists(folder / LATEST):  # a process was killed when its first checkpoint had just got its name
        return Found(there[-1]) if there else None
    choice = f"; or load one of these: {', '.join(map(str, there))}" if there else ""
    try:
        text = read_small(folder / LATEST, LONGEST).decode(errors="replace")
    except ValueError as error:
        raise CheckpointError(folder, [f"{LATEST} {error}; remove it{choice}"]) from None
    matched = re.fullmatch(rf"({CHECKPOINT.pattern})\n(?:([0-9a-f]{{64}})\n)?", text)
    if not matched:
        advice = f"write the name of a checkpoint into it, and a line break{choice}"
        raise CheckpointError(folder, [f"{LATEST} is damaged: it holds {text[:200]!r}; {advice}"])
    found = Found(folder / matched[1], matched[4])
    if not found.path.is_dir():
        raise CheckpointError(folder, [f"{LATEST} names {matched[1]}, which is not there{choice}"])
    return found


# Writing. Whoever writes a checkpoint holds a lock on its temporary folder, which ends with the process: what is not
# locked on this machine was left behind. What another machine left behind is nobody's to judge, and stays.


class Draft(NamedTuple):
    """A checkpoint under a temporary name, and the lock on it."""

    path: Path
    lock: int

    def end(self) -> None:
        """Lets go of the lock, and gives up a checkpoint that has got no name; once."""
        os.close(self.lock)
        if self.path.exists():
            remove_folder(self.path)


def begin(folder: Path, step_number: int) -> Draft:
    """Makes the temporary folder of a checkpoint; refused in one that is a checkpoint itself."""
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder} is a checkpoint itself, not the folder of a run; save to {folder.parent}")
    make_folder(folder)
    while True:
        path = _temporary(folder, f"step_{step_number}")
        os.mkdir(path)
        try:
            held, _ = lock(path, fcntl.LOCK_EX)
        except FileNotFoundError:
            continue  # another job took it for left behind
        except OSError:
            os.rmdir(path)
            raise
        if path.exists():
            return Draft(path, held)
        os.close(held)  # taken for left behind before it was locked


def _temporary(folder: Path, name: str) -> Path:
    return folder / f"{name}.tmp-{_machine()}-{secrets.token_hex(4)}"


def _machine() -> str:
    """Tells this machine, since it was started, from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    running = boot.read_bytes() if boot.exists() else str(uuid.getnode()).encode()
    return hashlib.sha256(running).hexdigest()[:8]


def lock(path: Path, how: int) -> tuple[int, bool]:
    """The descriptor of a file or folder, and whether it is locked; never in a file system without locks."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, how)
    except OSError:
        return handle, False
    return handle, True


def clear_leftovers(folder: Path) -> None:
    """Removes what processes of this machine left behind that were killed while they saved."""
    for path in sorted(folder.iterdir()):
        matched = LEFTOVER.fullmatch(path.name)
        if matched and matched[1] == _machine():
            with suppress(OSError):  # it may have got its name by now
                held, is_left = lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_left:
                    remove_folder(path)
                os.close(held)


def publish(draft: Draft, step_number: int, sha256: str) -> str:
    """Gives a complete checkpoint a name, which no other has, and makes it the latest; gives the name."""
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
    """Removes all but the last `keep` checkpoints up to the newest; never the latest, which another job may have set.

    Those of greater steps are not of this run's past, and stay.
    """
    limit = age(newest)
    assert limit is not None
    past = [path for path in checkpoints(folder) if (age(path.name) or limit) <= limit]
    with suppress(CheckpointError):
        latest = find(folder)
        for path in past[:-keep]:
            if latest is not None and path != latest.path:
                doomed = _temporary(folder, path.name)
                os.rename(path, doomed)  # never is a half of it seen under its name
                remove_folder(doomed)


FILE = re.compile(r"(?:stage_[0-9]+(?:\.(?:values|optimizer))?|extra)\.safetensors")
"""The names that files may have: none of them leads out of the folder."""


def read_manifest(found: Found) -> Manifest:
    """The manifest of a checkpoint; a ValueError says what is wrong with it."""
    try:
        data = read_small(found.path / MANIFEST, LARGEST)
        if found.sha256 not in (None, hashlib.sha256(data).hexdigest()):
            raise ValueError("is not the one that `latest` was written for; one of them is damaged")
        return from_bytes(data)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} {error}") from None


def find_damage(path: Path, manifest: Manifest, *, turn: int, turns: int) -> list[str]:
    """What is wrong with the files of a checkpoint; so many ranks take turns to read one through."""
    findings = []
    for at, (name, written) in enumerate(sorted(manifest.files.items())):
        if not FILE.fullmatch(name):
            findings.append(f"{MANIFEST} names {name!r}, which is no file of a checkpoint; do not trust it")
            continue
        try:
            with reading(path / name) as (file, size):
                if size != written["bytes"]:  # unread
                    were = f"{written['bytes']} were written: it is cut off, or of another checkpoint"
                    findings.append(f"{name} has {size} bytes, and {were}")
                elif at % turns == turn and hashlib.file_digest(file, "sha256").hexdigest() != written["sha256"]:
                    why = "its bytes are not those that were written (SHA-256)"
                    findings.append(f"{name} is damaged, or of another checkpoint: {why}")
        except ValueError as wrong:
            findings.append(f"{name} {wrong}")
    return findings
