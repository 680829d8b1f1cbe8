"""Collects the files of a checkpoint in parts: each rank gets the files that it needs, wherever they are.

A rank reads files in its folder, downloads files from a URL, and receives all other files from a rank that sees them.
It checks the size and the hash of every file that it needs.
"""

import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from gpipe.checkpoint.files import PIECE, TensorFiles
from gpipe.checkpoint.folder import FILE, find_damage
from gpipe.checkpoint.manifest import LARGEST, CheckpointError, Manifest, from_bytes
from gpipe.checkpoint.parts import EXTRA, MERGE, NO_ID, Save, join
from gpipe.checkpoint.places import Url, read_bytes, read_pieces, sizes_in
from gpipe.distributed.communicator import Communicator, FirstError, all_gather_checked

DAMAGED = "Restore the files from a copy. [checkpoint-damaged]"


@dataclass(frozen=True)
class Files:
    """The files of a checkpoint that a rank needs.

    Attributes:
        manifest: The manifest of these files.
        path: The folder of the checkpoint.
        elsewhere: The paths of files that are in a temporary folder.
    """

    manifest: Manifest
    path: Path
    elsewhere: Mapping[str, Path] = field(default_factory=dict)

    def tensors(self, pattern: str) -> TensorFiles:
        """Opens the safetensors files whose names match a regular expression."""
        names = [name for name in sorted(self.manifest.files) if re.fullmatch(pattern, name)]
        return TensorFiles(self.elsewhere.get(name, self.path / name) for name in names)


def collect(
    path: Path,
    save: Save,
    ranks: Communicator,
    wanted: Callable[[Mapping[str, str]], set[str]] | None,
    held: ExitStack,
) -> tuple[Files, Manifest]:
    """Collects the files that each rank needs. All ranks must call this function.

    Args:
        path: The folder of the checkpoint on this rank.
        save: The checkpoint, of which the ranks together see all parts.
        ranks: The processes.
        wanted: A function from the ties of the checkpoint to the names of the values that this rank reads, or None
            for all values.
        held: Keeps the temporary folder of files that are not in `path`.

    Returns:
        The files that this rank needs, and the manifest of the whole checkpoint.

    Raises:
        CheckpointError: If parts or files are missing or damaged, or belong to different saves.
    """
    parts = _agree_parts(path, save, ranks)
    whole = join(parts)
    names = None if wanted is None else wanted(whole.ties)
    needed = [part for part in parts if names is None or names & {*part.names, *part.values}]
    extra = {name: file for name, file in whole.files.items() if name == EXTRA}
    no_state = whole.optimizer and {**whole.optimizer, "groups": [], "state": {}}
    nothing = replace(whole, files=extra, names=[], values={}, optimizer=no_state)
    here = join([nothing, *needed])
    elsewhere, findings, failed = dict[str, Path](), list[str](), FirstError()
    sizes: dict[str, int] = {}
    with failed:
        sizes = {name: size for name, size in sizes_in(path).items() if name in whole.files and size >= 0}
    lacked = [name for name in here.files if name not in sizes and FILE.fullmatch(name)]
    doing = f"collected the files of {path}"
    gathered = all_gather_checked(ranks, [lacked, sizes], error=failed.error, doing=doing)
    sent: dict[str, list[int]] = {name: [] for lacked, _ in gathered for name in lacked}  # the ranks that see a file
    for name, holders in sent.items():
        holders += [rank for rank, (_, seen) in enumerate(gathered) if name in seen]
        if not holders:
            findings.append(f"{name} is missing. {MERGE} [missing-part]")
    if findings:
        raise CheckpointError(path, findings)
    with failed:
        downloads = [name for name in here.files if name in sizes] if isinstance(path, Url) else []
        if downloads or lacked:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="gpipe-")))
            elsewhere |= {name: folder / name for name in [*downloads, *lacked]}
        for name in downloads:
            with elsewhere[name].open("wb") as file:
                file.writelines(read_pieces(path / name))
    for name, (holder, *_) in sorted(sent.items()):
        target = elsewhere.get(name) if name in lacked else None
        _send(path / name, gathered[holder][1][name], holder, target, ranks, failed)
    with failed:
        findings = find_damage(path, here, elsewhere=elsewhere)
    if findings := list(chain(*all_gather_checked(ranks, findings, error=failed.error, doing=doing))):
        raise CheckpointError(path, list(dict.fromkeys(findings)), DAMAGED)
    return Files(here, path, elsewhere), whole


def _agree_parts(path: Path, save: Save, ranks: Communicator) -> list[Manifest]:
    """Returns the manifests of all parts. For each part, the first rank that sees it sends it to all ranks."""
    texts, failed = dict[int, str](), FirstError()
    findings = list[str]()
    with failed:
        for part in [part for part, holder in save.holders.items() if holder == ranks.rank]:
            try:
                data = read_bytes(path / save.file(part), LARGEST)
                if from_bytes(data).save_id != save.save_id and save.save_id != NO_ID:
                    raise ValueError("belongs to a different save: the file was renamed. Restore its name")
                texts[part] = data.decode()
            except ValueError as error:
                findings.append(f"{save.file(part)} cannot be used: it {error}. [damaged-part]")
    gathered = all_gather_checked(ranks, [texts, findings], error=failed.error, doing=f"read the parts of {path}")
    if findings := list(chain(*(found for _, found in gathered))):
        raise CheckpointError(path, list(dict.fromkeys(findings)))
    read = {int(part): text for texts, _ in gathered for part, text in texts.items()}
    return [from_bytes(read[part].encode()) for part in range(save.parts)]


def _send(path: Path, size: int, holder: int, target: Path | None, ranks: Communicator, failed: FirstError) -> None:
    """Sends a file from one rank to the ranks that have a target. All ranks must call this function.

    After an error, a rank continues with empty pieces, so that the other ranks do not wait. The caller raises the
    error.
    """
    pieces = read_pieces(path) if ranks.rank == holder else iter(())
    file: BinaryIO | None = None
    with ExitStack() as opened:
        with failed:
            file = opened.enter_context(target.open("wb")) if target else None
        for _ in range(0, size, PIECE):
            piece = b""
            with failed:
                piece = next(pieces, b"")
            piece = ranks.all_gather(piece)[holder]
            with failed:
                if file:
                    file.write(piece)
