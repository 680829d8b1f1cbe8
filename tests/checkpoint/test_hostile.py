"""A folder made by an enemy: whatever is in it, it is refused at once, and nothing of it is waited for or read."""

import hashlib
import json
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpipe
from gpipe.checkpoint.manifest import NO_HASH
from tests.support.checkpointed import differences, remembered

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


class Noted(nn.Linear):
    """Has state that is not a tensor."""

    note: Any = ("a", 1)

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        text, number = state["note"]
        self.note = text.upper().lower(), number + 0


WRITTEN: list[Any] = [
    *(None, True, -1, 1.5, 10**30, "x", [], ["x"], {}, {"x": 1}, {"$x": 1}),
    *({"$tuple": []}, {"$tuple": [1]}, {"$dict": []}, {"$dict": [[1, 2]]}, {"$dict": [1]}, {"$counter": []}),
    *({"$scalar": ["F32", 2.0]}, {"$scalar": ["I8", 1000]}, {"$float": "7ff8000000000000"}),
    *({"$tensor": "0.weight"}, {"$tensor": "0.weight/exp_avg"}, {"$tensor": "x"}),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in JSON."""
    if at:
        yield at
    inner_values = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inner_values:
        yield from places(inner, (*at, key))


def rewrite(run: Path, fields: dict[str, Any]) -> None:
    """Writes a manifest with the hash that belongs to it."""
    blank = json.dumps(fields | {"sha256": NO_HASH})
    data = blank.replace(NO_HASH, hashlib.sha256(blank.encode()).hexdigest()).encode()
    (run / "step_1" / "manifest.json").write_bytes(data)
    (run / "latest").write_text(f"step_1\n{hashlib.sha256(data).hexdigest()}\n")


def noted_pipe(steps: int) -> tuple[gpipe.GPipe, torch.optim.Optimizer]:
    torch.manual_seed(0)
    pipe = gpipe.GPipe([Noted(2, 3), nn.Linear(3, 1)], partitions=2, micro_batches=2, seed=1)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    for _ in range(steps):
        pipe.step(torch.ones(4, 2), torch.ones(4, 1), nn.functional.mse_loss)
        optimizer.step()
    return pipe, optimizer


@pytest.mark.parametrize("seed", range(4))
def test_a_manifest_may_say_anything_with_a_hash_that_fits(seed: int, tmp_path: Path) -> None:
    """Bug story: a step count that was a text raised a ValueError after the weights had changed."""
    gpipe.save(tmp_path, *noted_pipe(1), extra=[1, (2, 3)])
    written = json.loads((tmp_path / "step_1" / "manifest.json").read_text())
    by_depth: dict[Any, list[tuple[Any, ...]]] = {}
    for place in places({name: written[name] for name in written if name not in ("sha256", "format", "version")}):
        by_depth.setdefault((place[0], len(place)), []).append(place)
    drawn = random.Random(seed)
    own = noted_pipe(2)
    before = deepcopy(remembered(*own))
    for _ in range(100):
        (*outer, last), fields = drawn.choice(by_depth[drawn.choice([*by_depth])]), deepcopy(written)
        inside: Any = fields
        for key in outer:
            inside = inside[key]
        if drawn.random() < 0.1:
            del inside[last]
        else:
            inside[last] = deepcopy(drawn.choice(WRITTEN))
        rewrite(tmp_path, fields)
        try:
            gpipe.load(tmp_path, *own).state_dict()
        except gpipe.CheckpointError:
            assert differences(remembered(*own), before) == [], (outer, last, inside)
        else:
            own = noted_pipe(2)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("state/0.bias/step", "x", "step cannot be 'x'"),
        ("state/0.bias/exp_avg", {"$tensor": "0.weight/exp_avg"}, r"exp_avg cannot be a tensor of shape \[3, 2\]"),
        ("state/0.bias", {"x": 1}, "KeyError: 'step'"),
        ("state/0.bias", {"$tuple": []}, r"the manifest has \(\) instead of options by name"),
        ("groups/0/options/lr", "x", "lr cannot be 'x'"),
        ("groups/0/options/params", [], r"params cannot be \[\]"),
        ("groups/0/options/betas", {"$tuple": [0.9]}, r"betas cannot be \(0\.9,\)"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_with_the_name(
    place: str, value: Any, told: str, tmp_path: Path
) -> None:
    gpipe.save(tmp_path, *noted_pipe(1))
    fields = json.loads((tmp_path / "step_1" / "manifest.json").read_text())
    *outer, last = place.split("/")
    inside = fields["optimizer"]
    for key in outer:
        inside = inside[int(key) if isinstance(inside, list) else key]
    inside[last] = value
    rewrite(tmp_path, fields)
    with pytest.raises(gpipe.CheckpointError, match=told):
        gpipe.load(tmp_path, *noted_pipe(2))
