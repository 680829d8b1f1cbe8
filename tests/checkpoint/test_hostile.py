"""A folder made by an enemy: whatever is in it, it is refused at once, and nothing of it is waited for or read."""

import hashlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpipe

HUGE = 40 * 2**30


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's name is short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


TRAPS: dict[str, Callable[[Path], None]] = {
    "a fifo": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a loop": lambda path: path.symlink_to(path.name),
    "a sparse file": sparse,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a socket": listener,
}


def layers() -> list[nn.Module]:
    return [nn.Linear(2, 3), nn.Linear(3, 1)]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the files that are read through: none is large, where it must have another size."""
    sizes: list[int] = []
    original = hashlib.file_digest

    def file_digest(file: Any, name: str) -> Any:
        sizes.append(os.fstat(file.fileno()).st_size)
        return original(file, name)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    yield sizes
    assert max(sizes, default=0) < 2**20


@pytest.fixture
def run(tmp_path: Path, read: list[int]) -> Path:
    """The folder of a run, with a checkpoint in it."""
    pipe = gpipe.GPipe(layers(), partitions=2, micro_batches=2)
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.step(torch.ones(4, 2), torch.ones(4, 1), nn.functional.mse_loss)
    optimizer.step()
    gpipe.save(tmp_path, pipe, optimizer, extra={"tensor": torch.ones(3)})
    return tmp_path


def traps_for(path: Path) -> Iterator[None]:
    """Puts each trap in place of a file in turn, and the file back in the end."""
    aside = path.parent.parent / "aside"
    path.rename(aside)
    for trap in TRAPS.values():
        trap(path)
        yield
        path.unlink() if path.is_symlink() or not path.is_dir() else path.rmdir()
    aside.rename(path)


def test_latest_may_be_anything(run: Path) -> None:
    for _ in traps_for(run / "latest"):
        for look in (gpipe.load, gpipe.find_checkpoint):
            with pytest.raises(gpipe.CheckpointError, match=r"latest (is|has)"):
                look(run)


FILES = ["manifest.json", "stage_0.safetensors", "stage_1.optimizer.safetensors", "extra.safetensors"]


def test_so_may_a_file_of_a_checkpoint(run: Path) -> None:
    pipe = gpipe.GPipe(layers(), partitions=1, micro_batches=2)
    for name in FILES:
        for _ in traps_for(run / "step_1" / name):
            with pytest.raises(
                gpipe.CheckpointError, match=r"is a symbolic link|is not a file|bytes|is missing|no checkpoint"
            ):
                gpipe.load(run / "step_1", pipe)
            with pytest.raises(gpipe.CheckpointError):
                gpipe.load(run)


def test_a_file_of_another_size_is_not_read(run: Path, read: list[int]) -> None:
    path = run / "step_1" / "stage_0.safetensors"
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(gpipe.CheckpointError, match=r"stage_0\.safetensors has \d+ bytes instead of \d+"):
        gpipe.load(run)
    assert len(read) == 4
    assert path.stat().st_size not in read


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "model-1.safetensors"])
def test_weights_may_be_anything(name: str, trap: str, tmp_path: Path) -> None:
    TRAPS[trap](tmp_path / name)
    if name == "model-1.safetensors":
        index = json.dumps({"weight_map": {"0.weight": name}})
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises((gpipe.CheckpointError, OSError)):
        gpipe.load_weights(tmp_path, gpipe.GPipe(layers(), partitions=1, micro_batches=2))


HEADERS = {
    "larger than the file": struct.pack("<Q", 2**63) + b"{}",
    "huge, and all there": struct.pack("<Q", 10**9) + b"{",
    "deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "no text": struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
    "short": b"\1\0",
    "of offsets beyond": struct.pack("<Q", 63)
    + b'{"0.weight":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'
    + b" ",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_may_say_anything(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HEADERS[name])
    if "all there" in name:
        os.truncate(path, 2 * 10**9)
    with pytest.raises(gpipe.CheckpointError, match="is not a valid safetensors file"):
        gpipe.load_weights(tmp_path, gpipe.GPipe(layers(), partitions=1, micro_batches=2))


def test_a_tensor_of_another_shape_is_refused_unread(tmp_path: Path) -> None:
    rows = 2**28
    header = json.dumps({"0.weight": {"dtype": "F32", "shape": [rows], "data_offsets": [0, 4 * rows]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 4 * rows)
    with pytest.raises(gpipe.CheckpointError, match=rf"0\.weight is float32 \[{rows}\] in the checkpoint"):
        gpipe.load_weights(tmp_path, gpipe.GPipe(layers(), partitions=1, micro_batches=2))
