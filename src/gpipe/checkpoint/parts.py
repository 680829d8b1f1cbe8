"""Describes checkpoints in parts, whose processes write to different folders or to a URL.

    folder/                                         of any process, or merged from the folders of several processes
        step_12/
            part_0-of-2.187c0f3a5b21d940.json       the manifest of the files that rank 0 wrote
            stage_0.safetensors
            part_1-of-2.187c0f3a5b21d940.json       written by rank 1, perhaps on a different host
            stage_1.safetensors

Rule 1. A rank writes its part file after all of its other files, and atomically.
Rule 2. All parts of a checkpoint have the same save ID. The checkpoint is complete if the ranks that load it see all
        parts together. Nothing else marks a complete checkpoint.
Rule 3. A save ID is greater than every save ID in the folders of all ranks, so the newest checkpoint has the greatest
        ID. A checkpoint with one manifest has a save ID if the folder contained parts before, and is older otherwise.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeAlias

from gpipe.checkpoint.folder import PART, order_of, temporary_path
from gpipe.checkpoint.manifest import MANIFEST, Group, Manifest, Optimizer
from gpipe.checkpoint.places import Url, remove, sizes_in

Seen: TypeAlias = dict[str, list[str]]
"""The part files in each checkpoint of a folder, by the name of the checkpoint. `.` is the folder itself."""

EXTRA = "extra.safetensors"  # the file with the tensors of the user's extra value
NO_ID = "0" * 16  # of a checkpoint with one manifest


class Save(NamedTuple):
    """A checkpoint in parts, as all ranks together see it."""

    save_id: str
    order: tuple[int, int]
    name: str  # the name of its folder, or `.` for the folder that the user passed
    parts: int  # the number of parts of a complete checkpoint
    holders: dict[int, int]  # for each part, the first rank that sees it

    def file(self, part: int) -> str:
        """Returns the name of a part file."""
        return MANIFEST if self.save_id == NO_ID else f"part_{part}-of-{self.parts}.{self.save_id}.json"

    @property
    def missing(self) -> list[str]:
        """The part files that no rank sees."""
        return [self.file(part) for part in range(self.parts) if part not in self.holders]


def part_name(rank: int, ranks: int, save_id: str) -> str:
    """Returns the name of a part file."""
    return Save(save_id, (0, 0), "", ranks, {}).file(rank)


def look(folder: Path) -> Seen:
    """Lists the checkpoints in a folder and their part files. At a URL, a manifest is the only part."""

    def parts(names: Iterable[str]) -> list[str]:
        return [name for name in names if PART.fullmatch(name) or (name == MANIFEST and isinstance(folder, Url))]

    names = sizes_in(folder)
    here = {".": found} if (found := parts(names)) else {}
    return here | {name: parts(sizes_in(folder / name)) for name in names if order_of(name)}


def saves_in(gathered: Sequence[Seen]) -> list[Save]:
    """Returns the checkpoints in the folders of all ranks, with the oldest checkpoint first."""
    saves: dict[tuple[str, str, int], Save] = {}
    for rank, seen in enumerate(gathered):
        for name, files in seen.items():
            for file in files:
                matched = PART.fullmatch(file)
                part, parts, save_id = (int(matched[1]), int(matched[2]), matched[3]) if matched else (0, 1, NO_ID)
                if part < parts:
                    new = Save(save_id, order_of(name) or (0, 0), name, parts, {})
                    saves.setdefault((save_id, name, parts), new).holders.setdefault(part, rank)
    return sorted(saves.values(), key=lambda save: save[:4])


MERGE = "Load it in the processes that see all parts together, or copy the parts from all hosts into one folder."


def why_incomplete(save: Save, saves: Sequence[Save]) -> list[str]:
    """Returns a message for each part that no rank sees, and for each part of a different save in the same folder."""
    others = [each for each in saves if each.name == save.name and each.save_id != save.save_id]
    strange = [other.file(part) for other in others for part in sorted(other.holders)]
    own = ", ".join(save.file(part) for part in sorted(save.holders))
    return [f"{name} is missing. {MERGE} [missing-part]" for name in save.missing] + [
        f"{name} belongs to a different save than {own}. Copy only parts with the same ID. [parts-of-different-saves]"
        for name in (strange if save.missing else [])
    ]


def next_id(gathered: Sequence[Seen], now: int) -> str:
    """Returns a save ID that is greater than all save IDs in the folders: the time, unless a clock is slow."""
    return f"{max([now, *(int(save.save_id, 16) + 1 for save in saves_in(gathered))]):016x}"


def unused_name(gathered: Sequence[Seen], step_number: int) -> str:
    """Returns the name of a new checkpoint, which no folder contains."""
    names = (f"step_{step_number}" + (f".{again}" if again > 1 else "") for again in count(1))
    return next(name for name in names if not any(name in seen for seen in gathered))


def prune_parts(folder: Path, gathered: Sequence[Seen], keep: int, newest: str) -> None:
    """Keeps the newest checkpoint and the `keep - 1` complete checkpoints before it. Removes all older ones."""
    limit = order_of(newest) or (0, 0)
    complete = [save.name for save in saves_in(gathered) if not save.missing and save.order <= limit]
    for name in look(folder):
        is_old = (order_of(name) or limit) <= limit and name not in [*complete[-keep:], newest]
        if is_old and MANIFEST not in sizes_in(folder / name):
            with suppress(FileNotFoundError):  # A different process has removed it.
                remove(folder / name, temporary_path(folder, name))


def join(parts: Sequence[Manifest]) -> Manifest:
    """Joins the manifests of several ranks. The first rank has the user's extra value."""
    optimizers = [part.optimizer for part in parts if part.optimizer is not None]
    return replace(
        parts[0],
        files={name: file for part in parts for name, file in part.files.items()},
        names=[name for part in parts for name in part.names],
        ties={name: first for part in parts for name, first in part.ties.items()},
        values={name: value for part in parts for name, value in part.values.items()},
        optimizer=_join_optimizers(optimizers) if optimizers else None,
    )


def _join_optimizers(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Joins the saved optimizers of all ranks. Parameters with the same options form one group."""
    groups: dict[str, Group] = {}
    for group in [group for optimizer in optimizers for group in optimizer["groups"] if group["parameters"]]:
        key = json.dumps(group["options"], sort_keys=True)
        same = groups.setdefault(key, {"parameters": [], "options": group["options"]})
        same["parameters"] += group["parameters"]
    state = {name: entries for optimizer in optimizers for name, entries in optimizer["state"].items()}
    return {"type": optimizers[0]["type"], "groups": list(groups.values()), "state": state}
