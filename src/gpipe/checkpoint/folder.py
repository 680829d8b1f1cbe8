"""The folder of a run: its checkpoints by name, which is the latest, and what may be removed.

Looks for damage: whether a folder holds what its manifest says, to the last byte, and nothing else.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from gpipe.checkpoint.files import (
    File,
    hash_file,
    make_folder,
    put_file,
    read_small,
    remove_folder,
    size_of,
    sync_folder,
    why_not_plain,
)
from gpipe.checkpoint.manifest import LARGEST, MANIFEST, CheckpointError, Manifest, from_bytes

LATEST = "latest"
LONGEST = 4096  # bytes of it
CHECKPOINT = re.compile(r"step_(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?")
LEFTOVER = re.compile(r"step_[0-9.]+\.tmp-([0-9a-f]{8})-[0-9a-f]{8}")

logger = logging.getLogger("gpipe")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, and the hash that its manifest must have, if that is known."""

    path: Path
    sha256: str | None = None


def age(name: str) -> tuple[int, int] | None:
    """What checkpoints are ordered by: the step, and which one of that step it is; None if it is none.

    >>> age("step_12"), age("step_12.2"), age("step_12.tmp-1f0c9a2b-77de01c4")
    ((12, 1), (12, 2), None)
    """
    matched = CHECKPOINT.fullmatch(name)
    return (int(matched[1]), int(matched[2] or 1)) if matched else None


def checkpoints(folder: Path) -> list[str]:
    """The names of all checkpoints of a folder, oldest first."""
    known = {entry.name: age(entry.name) for entry in folder.iterdir()}
    return sorted((name for name, order in known.items() if order), key=lambda name: known[name] or ())


def find(folder: Path) -> Found | None:
    """The checkpoint that a folder is, or that its `latest` names."""
    if (folder / MANIFEST).exists():
        return Found(folder)
    if folder.is_file():
        raise CheckpointError(
            folder, ["this is a file; give the folder that gpipe.save was given, or a checkpoint's"]
        )
    try:
        text = read_small(folder / LATEST, LONGEST).decode()
    except UnicodeDecodeError:
        text = ""
    except FileNotFoundError:
        return _newest(folder)
    except ValueError as error:
        raise CheckpointError(folder, [f"{LATEST} {error}; remove it{_choice(folder)}"]) from None
    matched = re.fullmatch(rf"({CHECKPOINT.pattern})\n(?:([0-9a-f]{{64}})\n)?", text)
    if not matched:
        advice = f"write the name of a checkpoint into it, and a line break{_choice(folder)}"
        raise CheckpointError(folder, [f"{LATEST} is damaged: it holds {text[:200]!r}; {advice}"])
    found = Found(folder / matched[1], matched[4])
    if not found.path.is_dir():
        raise CheckpointError(folder, [f"{LATEST} names {matched[1]}, which is not there{_choice(folder)}"])
    return found


def _newest(folder: Path) -> Found | None:
    """What there is if a process was killed when its first checkpoint had its name, but was not yet the latest."""
    names = checkpoints(folder) if folder.is_dir() else []
    return Found(folder / names[-1]) if names else None


def _choice(folder: Path) -> str:
    names = checkpoints(folder)
    return f"; or load one of these: {', '.join(str(folder / name) for name in names)}" if names else ""


def others(path: Path) -> list[str]:
    """The other checkpoints beside one, newest first."""
    if age(path.name) is None or not path.parent.is_dir():
        return []
    return [str(path.parent / name) for name in reversed(checkpoints(path.parent)) if name != path.name]


# Writing. Whoever writes a checkpoint holds a lock on its temporary folder, which ends with the process: what is not
# locked on this machine was left behind. What another machine left behind is nobody's to judge, and stays.


@dataclass(slots=True)
class Draft:
    """A checkpoint under a temporary name, and the lock on it."""

    path: Path
    lock: int | None

    def close(self) -> None:
        """Lets go of the lock, if that is not done yet."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def discard(self) -> None:
        """Gives the checkpoint up."""
        self.close()
        if self.path.exists():
            remove_folder(self.path)


def begin(folder: Path, step_number: int) -> Draft:
    """Makes the temporary folder of a checkpoint; refused in one that is a checkpoint itself."""
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder} is a checkpoint itself, not the folder of a run; save to {folder.parent}")
    make_folder(folder)
    while True:
        path = folder / f"step_{step_number}.tmp-{_machine()}-{secrets.token_hex(4)}"
        os.mkdir(path)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another job took it for left behind
        except OSError:
            os.rmdir(path)
            raise
        with suppress(OSError):  # a file system without locks; then nothing is taken for left behind either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return Draft(path, lock)
        os.close(lock)  # taken for left behind before it was locked


def _machine() -> str:
    """Tells this machine, since it was started, from all others."""
    try:
        running = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        running = str(uuid.getnode())
    return hashlib.sha256(running.encode()).hexdigest()[:8]


@contextmanager
def _abandoned(path: Path) -> Iterator[bool]:
    """Whether no process of this machine writes a temporary folder; while one looks, none does."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except OSError:
        free = False
    try:
        yield free
    finally:
        os.close(lock)


def clear_leftovers(folder: Path) -> None:
    """Removes what processes of this machine left behind that were killed while they saved."""
    for path in sorted(folder.iterdir()):
        matched = LEFTOVER.fullmatch(path.name)
        if matched and matched[1] == _machine():
            with _abandoned(path) as free:
                if free:
                    remove_folder(path)


def publish(draft: Draft, step_number: int, sha256: str) -> str:
    """Gives a complete checkpoint its name, and makes it the latest; gives the name.

    A name that is taken stays whose it is, be it of another job, or of this one that went back and came by again.
    """
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
    past = [name for name in checkpoints(folder) if (age(name) or limit) <= limit]
    with suppress(CheckpointError):
        latest = find(folder)
        for name in past[:-keep]:
            if latest is not None and name != latest.path.name:
                doomed = folder / f"{name}.tmp-{_machine()}-{secrets.token_hex(4)}"
                os.rename(folder / name, doomed)  # never is a half of it seen under its name
                remove_folder(doomed)


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
