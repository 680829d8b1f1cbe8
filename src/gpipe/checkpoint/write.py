"""Writes a checkpoint: each rank its part, rank 0 what makes them one. Nothing here waits for another rank's thread.

all      in the background: of rank 2 part_2.begun, locked for as long as the process lives
rank 2   of each of its stages, say 5, stage_5.safetensors and stage_5.optimizer.safetensors, all synced;
         then part_2.json, which has their hashes
rank 0   the same; once all parts are there: manifest.json, the parts' notes removed, rename, latest
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gpipe.checkpoint.files import File, encoded, naming, put_file, write_file
from gpipe.checkpoint.folder import Draft, clear_leftovers, prune, publish
from gpipe.checkpoint.gather import Part
from gpipe.checkpoint.manifest import MANIFEST, Manifest, to_bytes
from gpipe.errors import RemoteError

POLL = 0.05  # seconds between two looks for the parts of other ranks

logger = logging.getLogger("gpipe")


@dataclass(frozen=True)
class Writing:
    """What a rank has to write, and where.

    Attributes:
        rank: Its number.
        ranks: How many ranks write.
        path: The temporary folder.
        part: What it writes; emptied on the way.
        numbers: The fields of the manifest that every rank knows.
        keep: How many checkpoints stay, if not all.
        limit: Seconds that rank 0 waits for ranks of which nothing more comes.
        gone: Which ranks have no connection any more: they may have closed it, and write all the same.
    """

    rank: int
    ranks: int
    path: Path
    part: Part
    numbers: Mapping[str, Any]
    keep: int | None
    limit: float
    gone: Callable[[], Collection[int]] = tuple


def write_part(writing: Writing) -> None:
    """Writes this rank's part, and then the note that it is there."""
    if writing.rank >= writing.ranks:
        return
    if writing.rank == 0:
        clear_leftovers(writing.path.parent)
    files = {}
    for name in list(writing.part.files):
        files[name] = asdict(write_file(writing.path / name, encoded(writing.part.files.pop(name))))
    text = json.dumps(writing.part.said | {"files": files})
    put_file(note(writing, writing.rank), writing.path / f"part_{writing.rank}.tmp", text.encode())


def note(writing: Writing, rank: int) -> Path:
    """Where a rank notes that its part is there, and what it has to say."""
    return writing.path / f"part_{rank}.json"


def begin_part(writing: Writing) -> int | None:
    """Shows the others that this rank lives and will write: a lock, which ends with the process."""
    if writing.rank >= writing.ranks:
        return None
    path, shown = writing.path / f"part_{writing.rank}.tmp3", _sign_of(writing, writing.rank)
    with naming(path):
        lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(path, shown)
        except BaseException:
            os.close(lock)
            raise
    return lock


def _sign_of(writing: Writing, rank: int) -> Path:
    return writing.path / f"part_{rank}.begun"


def _is_gone(writing: Writing, rank: int) -> bool:
    """Whether a process has ended before its part was there."""
    try:
        sign = os.open(_sign_of(writing, rank), os.O_RDONLY)
    except FileNotFoundError:
        return rank in writing.gone() and not _sign_of(writing, rank).exists()
    try:
        fcntl.flock(sign, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is locked, or cannot be
        return False
    finally:
        os.close(sign)
    return not note(writing, rank).exists() and not _failure_of(writing, rank).exists()


def _failure_of(writing: Writing, rank: int) -> Path:
    return writing.path / f"part_{rank}.failed"


def note_failure(writing: Writing, error: Exception) -> None:
    """Lets rank 0 know that this part will not come."""
    for stage in {name.partition(".")[0] for name in writing.part.files}:
        for file in writing.path.glob(f"{stage}.*"):
            file.unlink()  # on a full disk there is no room for the note else
    text = json.dumps([type(error).__name__, str(error)])
    put_file(_failure_of(writing, writing.rank), writing.path / f"part_{writing.rank}.tmp2", text.encode())


def await_parts(writing: Writing) -> None:
    """Waits for the parts of all ranks, as long as something comes."""
    size, since = -1, time.monotonic()
    while missing := [rank for rank in range(writing.ranks) if not note(writing, rank).exists()]:
        for rank in missing:
            failed = _failure_of(writing, rank)
            if failed.exists():
                kind, text = json.loads(failed.read_text())
                raise RemoteError(f"rank {rank} failed: {kind}: {text}", rank, kind)
            if _is_gone(writing, rank):
                raise RemoteError(
                    f"rank {rank} is gone; it ended before its part of the checkpoint was written", rank
                )
        now = _bytes_in(writing.path)
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > writing.limit:
            raise TimeoutError(
                f"ranks {missing} wrote nothing into {writing.path} for {writing.limit:g} seconds; look whether they "
                f"are alive, and whether the folder is one that all hosts share"
            )
        time.sleep(POLL)


def _bytes_in(folder: Path) -> int:
    size = 0
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # renamed meanwhile
            size += entry.stat().st_size
    return size


def finish(writing: Writing, draft: Draft) -> str:
    """Makes the parts one checkpoint, the latest, and removes what is too much; gives its name."""
    notes = [note(writing, rank) for rank in range(writing.ranks)]
    manifest = joined([json.loads(path.read_text()) for path in notes], writing.numbers)
    data = to_bytes(manifest, {"gpipe": _version(), "torch": torch.__version__})
    write_file(writing.path / MANIFEST, [data])
    for path in [*notes, *writing.path.glob("part_*.begun")]:
        os.unlink(path)
    name = publish(draft, manifest.step_number, hashlib.sha256(data).hexdigest())
    draft.close()
    if writing.keep is not None:
        try:
            prune(writing.path.parent, writing.keep, name)
        except OSError as error:
            logger.warning("%s is saved, but older checkpoints could not be removed: %s", name, error)
    return name


def _version() -> str:
    try:
        return version("gpipe")
    except PackageNotFoundError:
        return "unknown"


def joined(parts: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any]) -> Manifest:
    """The manifest of what all ranks have to say."""
    names = [name for part in parts for name in part["names"]]
    twice = [name for name, times in Counter(names).items() if times > 1]
    optimizers = [part["optimizer"] for part in parts if "optimizer" in part]
    kinds = sorted({optimizer["type"] for optimizer in optimizers})
    if twice:
        raise ValueError(f"several ranks hold {', '.join(twice)}; they are not stages of one pipe")
    if len(kinds) > 1:
        raise ValueError(
            f"the ranks have different optimizers, {', '.join(kinds)}; give save one type on all of them"
        )
    return Manifest(
        files={name: File(**file) for part in parts for name, file in part["files"].items()},
        names=names,
        ties=_union(part["ties"] for part in parts),
        values=_union(part["values"] for part in parts),
        optimizer=_joined_optimizer(optimizers) if optimizers else None,
        extra=parts[0]["extra"],
        **numbers,
    )


def _union(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for mapping in mappings for key, value in mapping.items()}


def _joined_optimizer(optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One optimizer; parameters of the same options make one group, whichever rank they are of."""
    groups: dict[str, dict[str, Any]] = {}
    for group in [group for optimizer in optimizers for group in optimizer["groups"] if group["parameters"]]:
        key = json.dumps(group["options"], sort_keys=True)
        same = groups.setdefault(key, {"parameters": [], "options": group["options"]})
        same["parameters"] += group["parameters"]
    state = _union(optimizer["state"] for optimizer in optimizers)
    return {"type": optimizers[0]["type"], "groups": list(groups.values()), "state": state}
