"""Writes the files of a rank, and completes the checkpoint.

    calling thread of each rank    collect, copy | agree on the folder |                    wait | agree on success
    writing thread of each rank                                        | write part, write note
    writing thread of rank 0                                           | write part, await all notes, publish

In the foreground, the calling thread also does the work of the writing threads, and the ranks agree before rank 0
publishes. Only calling threads communicate with other ranks. Writing threads communicate through files in the folder:

all      in the background, rank 2 writes part_2.begun, which is locked while the process runs
rank 2   for each of its stages, such as 5, stage_5.safetensors and stage_5.optimizer.safetensors, all synced;
         then part_2.json with their hashes
rank 0   the same; after all parts are there: writes manifest.json, removes the notes, renames, writes latest

If the ranks do not share a folder, or if the folder is a URL, each rank writes its part to its folder, as `parts.py`
describes. Then no rank waits for the parts of other ranks. A checkpoint is complete when all parts exist.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpipe.checkpoint.files import encode_file, opened, put_file
from gpipe.checkpoint.folder import Draft, clear_leftovers, lock, prune, publish
from gpipe.checkpoint.gather import Part
from gpipe.checkpoint.manifest import MANIFEST, Manifest, from_bytes, to_bytes
from gpipe.checkpoint.parts import join, part_name
from gpipe.checkpoint.places import commit_file, create_folder, remove_files, write_file
from gpipe.errors import RemoteError

POLL = 0.05  # seconds between checks for the parts of other ranks

logger = logging.getLogger("gpipe")


@dataclass(frozen=True)
class Writing:
    """The tensors and manifest entries that a rank writes, and the folder of its files."""

    rank: int
    ranks: int  # the number of ranks that write
    path: Path  # the temporary folder, or the final folder of a checkpoint in parts
    part: Part  # Its tensors are removed as they are written.
    numbers: Mapping[str, Any]  # the fields of the manifest that every rank knows
    draft: Draft | None  # only on rank 0
    keep: int | None  # the number of checkpoints to keep, or None for all
    limit: float  # seconds that rank 0 waits for ranks that write nothing
    gone: Callable[[], Collection[int]]  # ranks without a connection, which may still be writing
    in_parts: bool = False  # whether each rank writes a complete part, for which no other rank waits

    @property
    def writes(self) -> bool:
        """Whether this rank writes. Only the ranks of the first replica do."""
        return self.rank < self.ranks

    @property
    def part_path(self) -> Path:
        """The path of the part file of this rank."""
        return self.path / part_name(self.rank, self.ranks, self.numbers["save_id"])

    def manifest(self) -> bytes:
        """Returns the manifest of the files that this rank has written."""
        fields = {"optimizer": None, "extra": None, **self.part.fields, **self.numbers}
        return to_bytes(Manifest(files=self.part.written, **fields))

    def note_path(self, rank: int, what: str) -> Path:
        """Returns the path of a note of a rank. Writing has `begun`, has `failed`, or is complete (`json`)."""
        return self.path / f"part_{rank}.{what}"

    def write_note(self, what: str, content: bytes) -> None:
        """Writes a note of this rank, which other ranks read."""
        path = self.note_path(self.rank, what)
        put_file(path, path.with_suffix(f".{what}.tmp"), content)

    def discard_part(self) -> None:
        """Removes the files of this rank, unless its part is complete."""
        if self.in_parts and self.writes and not self.part.is_committed:
            remove_files(self.path, [*self.part.written, *self.part.files])


def write_part(writing: Writing) -> None:
    """Writes the files of this rank, and then the note that all files are complete."""
    if not writing.writes:
        return
    part = writing.part
    if writing.in_parts:
        create_folder(writing.path)
    elif writing.rank == 0:
        clear_leftovers(writing.path.parent)
    for name in list(part.files):
        part.written[name] = write_file(writing.path / name, encode_file(part.files[name]))
        del part.files[name]
    if not writing.in_parts:
        writing.write_note("json", writing.manifest())


def begin_part(writing: Writing, held: ExitStack) -> None:
    """Creates and locks a note. While the lock exists, other ranks know that this process is alive and will write."""
    if writing.in_parts or not writing.writes:
        return
    shown = writing.note_path(writing.rank, "begun")
    hidden = shown.with_suffix(".begun.tmp")
    with opened(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as made:
        with suppress(OSError):  # Some file systems have no locks.
            fcntl.flock(made, fcntl.LOCK_EX)
        os.rename(hidden, shown)
        held.callback(os.close, os.dup(made))  # The duplicate keeps the lock.


def _is_gone(writing: Writing, rank: int) -> bool:
    try:
        sign, is_left = lock(writing.note_path(rank, "begun"), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return rank in writing.gone() and not writing.note_path(rank, "begun").exists()
    os.close(sign)
    return is_left and not any(writing.note_path(rank, what).exists() for what in ("json", "failed"))


def note_failure(writing: Writing, error: Exception) -> None:
    """Writes a note for rank 0 that this rank failed, and removes its files."""
    if writing.in_parts or writing.draft is not None:
        writing.discard_part()
        return  # Rank 0 needs no note, and the ranks of a checkpoint in parts read none.
    for stage in {name.partition(".")[0] for name in writing.part.files}:
        for file in writing.path.glob(f"{stage}.*"):
            file.unlink()  # Makes room for the note on a full disk.
    writing.write_note("failed", json.dumps([type(error).__name__, str(error)]).encode())


def _await_parts(writing: Writing) -> None:
    size, since = -1, time.monotonic()
    while missing := [rank for rank in range(writing.ranks) if not writing.note_path(rank, "json").exists()]:
        for rank in missing:
            failed = writing.note_path(rank, "failed")
            if failed.exists():
                kind, text = json.loads(failed.read_text())
                raise RemoteError(f"rank {rank} failed: {kind}: {text}", rank, kind)
            if _is_gone(writing, rank):
                raise RemoteError(f"rank {rank} ended before it had written its part of the checkpoint.", rank)
        written = 0
        for entry in os.scandir(writing.path):
            with suppress(FileNotFoundError):  # The file was renamed in the meantime.
                written += entry.stat().st_size
        if written != size:
            size, since = written, time.monotonic()
        if time.monotonic() - since > writing.limit:
            raise TimeoutError(
                f"ranks {missing} wrote nothing to {writing.path} for {writing.limit:g} seconds. Check that these "
                f"processes are alive, and that all hosts share the folder."
            )
        time.sleep(POLL)


def finish(writing: Writing) -> str | None:
    """Publishes the checkpoint and returns its name, or None on ranks that do not publish.

    Rank 0 publishes the checkpoint, and removes old checkpoints. For a checkpoint in parts, each rank publishes its
    part.
    """
    if writing.in_parts and writing.writes:
        commit_file(writing.part_path, writing.manifest())
        writing.part.is_committed = True
        return writing.path.name
    if writing.draft is None:
        return None
    _await_parts(writing)
    notes = [writing.note_path(rank, "json") for rank in range(writing.ranks)]
    manifest = join([from_bytes(path.read_bytes()) for path in notes])
    data = to_bytes(manifest)
    write_file(writing.path / MANIFEST, [data])
    for path in [*notes, *writing.path.glob("part_*.begun")]:
        os.unlink(path)
    name = publish(writing.draft, manifest.step_number, hashlib.sha256(data).hexdigest())
    if writing.keep is not None:
        with warning_if_not_removed(name):
            prune(writing.path.parent, writing.keep, name)
    return name


@contextmanager
def warning_if_not_removed(name: str) -> Iterator[None]:
    """Logs an error of the removal of old checkpoints instead of raising it: the new checkpoint is complete."""
    try:
        yield
    except OSError as error:
        logger.warning("%s is saved, but old checkpoints were not removed: %s. [leftover-files]", name, error)
