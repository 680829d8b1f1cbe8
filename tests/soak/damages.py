"""Ways to damage a checkpoint: each names what a refusal must tell of, and does it to the folder of a run.

The run has checkpoints of steps 1 and 2, of which the second is damaged, and its `latest`.
"""

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

from tests.checkpoint.test_damage import forge

Act: TypeAlias = Callable[[Path], object]
"""What damages a run, given its folder."""
Edit: TypeAlias = Callable[[bytes], bytes]
"""What becomes of a file's bytes."""

MANIFEST, LATEST, BEFORE = "manifest.json", "step_2", "step_1"


@dataclass(frozen=True)
class Damage:
    """One way to damage a run.

    Attributes:
        kind: What is done, in words.
        names: Of files or folders, of which a refusal must name one.
        act: Does it.
        by_name: Whether the checkpoint is damaged also for those who do not ask `latest`.
    """

    kind: str
    names: Sequence[str]
    act: Act
    by_name: bool = True


# Bytes.


def change(name: str, edit: Edit) -> Act:
    """Writes something else into a file of the latest checkpoint, or into `latest`."""

    def act(run: Path) -> None:
        path = run / name if name == "latest" else run / LATEST / name
        path.write_bytes(edit(path.read_bytes()))

    return act


def bits(sizes: Mapping[str, int], each: int) -> Iterator[Damage]:
    """One bit of each so many of every file turned over, at a place that is drawn; `sizes` are in bytes."""
    draw = random.Random(0)
    for name, size in sizes.items():
        for first in range(0, 8 * size, each):
            at = draw.randrange(first, min(first + each, 8 * size))
            yield Damage("a bit turned over", [name], change(name, partial(_flip, at)), by_name=name != "latest")


def _flip(at: int, data: bytes) -> bytes:
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def _zero(first: float, last: float, data: bytes) -> bytes:
    start, end = int(first * len(data)), int(last * len(data))
    return data[:start] + bytes(end - start) + data[end:]


def _swap_parts(data: bytes) -> bytes:
    third = len(data) // 3
    return data[third : 2 * third] + data[:third] + data[2 * third :]


def _cut(share: float, data: bytes) -> bytes:
    return data[: int(share * len(data))]


def _append(more: bytes, data: bytes) -> bytes:
    return data + more


EIGHTHS = [eighth / 8 for eighth in range(8)]
EDITS: dict[str, list[Edit]] = {
    "empty": [partial(_cut, 0)],
    "cut off": [*(partial(_cut, share) for share in EIGHTHS[1:]), lambda data: data[:1], lambda data: data[:-1]],
    "the end is zeros": [*(partial(_zero, share, 1) for share in EIGHTHS), lambda data: data[:-1] + b"\0"],
    "a part is zeros": [partial(_zero, share, share + 1 / 8) for share in EIGHTHS],
    "bytes appended": [*(partial(_append, more) for more in (b"\0", b"\n", bytes(4096))), lambda data: data + data],
    "parts swapped": [_swap_parts],
}
"""What a disk, or a copy that was broken off, makes of a file."""


def contents(names: Sequence[str]) -> Iterator[Damage]:
    """Every edit of every file."""
    for name in names:
        for kind, edits in EDITS.items():
            yield from (Damage(kind, [name], change(name, edit), by_name=name != "latest") for edit in edits)


# Files.


def places(names: Sequence[str]) -> Iterator[Damage]:
    """What is not where it belongs."""
    for name in names:
        yield Damage("missing", [name], partial(_remove, [name]))
        for to in ("stage_7.safetensors", f"{name}.part", name.upper()):
            yield Damage("renamed", [name, to], partial(_rename, name, to))
        yield Damage("a folder in its place", [name], partial(_replace, name, os.mkdir))
        yield Damage("a pipe in its place", [name], partial(_replace, name, os.mkfifo))
        yield Damage("a link in its place", [name], partial(_link, name))
    for one, other in combinations(names, 2):
        yield Damage("swapped in a checkpoint", [one, other], partial(_swap, one, other))
        yield Damage("two missing", [one], partial(_remove, [one, other]))
    for more in ("stage_2.safetensors", "stage_0.safetensors.part", "notes", ".hidden"):
        for data in (b"", b"more"):
            yield Damage("an extra file", [more], partial(_put, f"{LATEST}/{more}", data))
    yield Damage("an extra folder", ["more"], lambda run: (run / LATEST / "more").mkdir())


def _put(path: str, data: bytes, run: Path) -> None:
    (run / path).write_bytes(data)


def _remove(names: Sequence[str], run: Path) -> None:
    for name in names:
        (run / LATEST / name).unlink()


def _rename(name: str, to: str, run: Path) -> None:
    (run / LATEST / name).rename(run / LATEST / to)


def _replace(name: str, make_other: Callable[[Path], object], run: Path) -> None:
    (run / LATEST / name).unlink()
    make_other(run / LATEST / name)


def _link(name: str, run: Path) -> None:
    (run / LATEST / name).rename(run / "elsewhere")
    (run / LATEST / name).symlink_to(run / "elsewhere")


def _swap(one: str, other: str, run: Path) -> None:
    first, second = run / LATEST / one, run / LATEST / other
    first.rename(run / "x")
    second.rename(first)
    (run / "x").rename(second)


# Saves.


def mixtures(runs: Path, names: Sequence[str]) -> Iterator[Damage]:
    """Files of other saves: of another step, another run, another number of processes."""
    origins = {
        "of another step": runs / "run" / BEFORE,
        "of another run": runs / "other" / LATEST,
        "of another world": runs / "world" / LATEST,
    }
    data = [name for name in names if name != MANIFEST]
    for kind, origin in origins.items():
        there = [name for name in data if (origin / name).exists()]
        for name in there:
            yield Damage(f"a file {kind}", [name], partial(_copy, origin, [name]))
        stage = [name for name in there if name.startswith("stage_1")]
        yield Damage(f"all of a stage {kind}", stage, partial(_copy, origin, stage))
        yield Damage(f"all but the manifest {kind}", there, partial(_copy, origin, there))
        some = [MANIFEST, LATEST, *data]
        yield Damage(f"the manifest {kind}", some, partial(_manifest, origin, told=False))
        yield Damage(f"the manifest {kind}, and `latest`", some, partial(_manifest, origin, told=True))


def _copy(origin: Path, names: Sequence[str], run: Path) -> None:
    for name in names:
        shutil.copy(origin / name, run / LATEST / name)


def _manifest(origin: Path, run: Path, *, told: bool) -> None:
    data = (origin / MANIFEST).read_bytes()
    (run / LATEST / MANIFEST).write_bytes(data)
    if told:
        (run / "latest").write_text(f"{LATEST}\n{hashlib.sha256(data).hexdigest()}\n")


# Runs.


def latests() -> Iterator[Damage]:
    """What `latest` and the name of a checkpoint may be."""
    texts = (b"", b"\n", b"step_2", b"step_3\n", b"step_\xff\n", b"../run/step_2\n", b"step_2\nstep_1\n", b"/etc\n")
    for text in texts:
        yield Damage("`latest` overwritten", ["latest"], partial(_put, "latest", text), by_name=False)
    yield Damage("`latest` names what is gone", ["latest"], _remove_all, by_name=False)
    yield Damage("`latest` of another step", ["latest"], _latest_of_another, by_name=False)
    yield Damage("a checkpoint renamed", [LATEST, "step_3"], partial(_renamed, "step_3"), by_name=False)
    yield Damage("another version", [MANIFEST], lambda run: forge(run / LATEST, lambda _: {"version": 2}))


def _remove_all(run: Path) -> None:
    shutil.rmtree(run / LATEST)


def _latest_of_another(run: Path) -> None:
    sha256 = (run / "latest").read_text().splitlines()[1]
    (run / "latest").write_text(f"{BEFORE}\n{sha256}\n")


def _renamed(to: str, run: Path) -> None:
    (run / LATEST).rename(run / to)
    (run / "latest").write_text(f"{to}\n")
