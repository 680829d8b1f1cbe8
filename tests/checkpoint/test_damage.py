"""Law: a damaged checkpoint is refused, whatever the damage; all of it is told at once, and nothing changes."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpipe
from tests.support.checkpointed import Victim, adamw, build, differences, make, snapshot
from tests.support.thread_ranks import optimizer_of, rank_pipes, run_ranks

FILES = [
    "manifest.json",
    "stage_0.safetensors",
    "stage_0.optimizer.safetensors",
    "stage_1.safetensors",
    "stage_1.optimizer.safetensors",
    "stage_1.values.safetensors",
    "extra.safetensors",
]


def refused(folder: Path, victim: Victim) -> list[str]:
    """What is said to be wrong."""
    with pytest.raises(gpipe.CheckpointError, match=r"cannot be loaded\. Nothing was changed") as raised:
        gpipe.load(folder, *victim)
    assert str(raised.value.path) in str(raised.value)
    assert re.search(r" \[(checkpoint|latest)-[a-z-]+\]$", str(raised.value))
    return raised.value.findings


def forge(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Changes a manifest as one would who knows how its hash is made."""
    file = path / "manifest.json"
    fields = json.loads(file.read_bytes())
    text = json.dumps(fields | change(fields) | {"sha256": "0" * 64})
    data = f"{text[:-66]}{hashlib.sha256(text.encode()).hexdigest()}{text[-2:]}".encode()
    file.write_bytes(data)
    (path.parent / "latest").write_text(f"{path.name}\n{hashlib.sha256(data).hexdigest()}\n")


def test_every_byte_counts(tmp_path: Path) -> None:
    """Each byte of each file is changed in turn; and what was loaded before loads again when it is put right."""
    pipe = make([nn.Linear(1, 1)], 1)
    gpipe.save(tmp_path, pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), extra=torch.ones(2))
    accepted = []
    files = [tmp_path / "latest", *sorted((tmp_path / "step_0").iterdir())]
    for path in files:
        good = path.read_bytes()
        for at in range(len(good)):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            path.write_bytes(bad)
            try:
                gpipe.load(tmp_path)
            except gpipe.CheckpointError:
                continue
            accepted.append((path.name, at))
        path.write_bytes(good)
    assert accepted == []
    assert len(files) == 4
    gpipe.load(tmp_path)


def test_a_damaged_file_is_refused_before_anything_changes(run: Path, victim: Victim) -> None:
    for name in FILES:
        path = run / "step_2" / name
        good = path.read_bytes()
        at = len(good) * 3 // 4
        flipped = good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :]
        for bad in (flipped, good[:-1], good[: len(good) // 2], good[:1], b""):
            path.write_bytes(bad)
            (finding,) = refused(run, victim)
            assert name in finding
            assert bad != flipped or "damaged" in finding
        with pytest.raises(gpipe.CheckpointError, match=f"or load one of these checkpoints: {run / 'step_1'}"):
            gpipe.load(run)
        path.unlink()
        assert refused(run, victim) == [f"{name} is missing."]
        path.write_bytes(good)
    gpipe.load(run / "step_1")


@pytest.mark.parametrize("origin", ["run/step_1", "other/step_2"])
def test_the_manifest_of_another_step_or_run_is_refused(origin: str, runs: Path, run: Path, victim: Victim) -> None:
    shutil.copy(runs / origin / "manifest.json", run / "step_2" / "manifest.json")
    (finding,) = refused(run, victim)
    assert finding == "manifest.json does not have the hash in `latest`. One of these files is damaged."
    for finding in refused(run / "step_2", victim):  # which `latest` does not tell about
        assert "from a different checkpoint" in finding


def test_a_damaged_or_dangling_latest_is_refused(run: Path, victim: Victim) -> None:
    latest = (run / "latest").read_bytes()
    for text in (b"", b"step_2", b"step_\xff\n", b"../run/step_2\n", b"step_2\nstep_1\n", b"/etc\n"):
        (run / "latest").write_bytes(text)
        (finding,) = refused(run, victim)
        assert finding.startswith("latest is damaged: it contains ")
        assert f"Or load one of these checkpoints: {run / 'step_1'}, {run / 'step_2'}." in finding
    (run / "latest").write_bytes(latest)
    shutil.rmtree(run / "step_2")
    assert refused(run, victim) == [
        f"latest names step_2, which does not exist. Or load one of these checkpoints: {run / 'step_1'}. "
        "[latest-damaged]"
    ]
    with pytest.raises(gpipe.CheckpointError, match="latest names step_2, which does not exist"):
        gpipe.find_checkpoint(run)


def test_all_files_load_and_one_may_write_latest_by_hand(run: Path) -> None:
    assert sorted(path.name for path in (run / "step_2").iterdir()) == sorted(FILES)
    (run / "latest").write_text("step_1\n")
    assert gpipe.load(run).step_number == 1
    (run / "latest").unlink()
    assert gpipe.load(run).step_number == 2


def test_no_checkpoint_is_told(tmp_path: Path, victim: Victim) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert gpipe.find_checkpoint(folder) is None
        (finding,) = refused(folder, victim)
        assert finding.startswith("The folder has no checkpoint.")


# What is whole and does not fit.


def test_another_model_is_refused_with_all_that_differs(run: Path) -> None:
    layers = build()
    layers[0] = nn.Linear(4, 7)
    layers[5] = nn.Linear(5, 2).double()
    pipe = make([*layers, nn.Linear(2, 2)], 2)
    before = snapshot(pipe, None)
    with pytest.raises(gpipe.CheckpointError) as raised:
        gpipe.load(run, pipe)
    other_model, other_type = "Build the model that was saved.", "Convert the model with .to(dtype)."
    assert raised.value.findings == [
        f"0.weight is float32 [6, 4] in the checkpoint, but float32 [7, 4] in the model. {other_model}",
        f"0.bias is float32 [6] in the checkpoint, but float32 [7] in the model. {other_model}",
        f"5.weight is float32 [2, 5] in the checkpoint, but float64 [2, 5] in the model. {other_type}",
        f"5.bias is float32 [2] in the checkpoint, but float64 [2] in the model. {other_type}",
        f"The checkpoint lacks 6.weight, 6.bias. {other_model}",
    ]
    assert differences(snapshot(pipe, None), before) == []
    with pytest.raises(gpipe.CheckpointError) as raised:
        gpipe.load(run, nn.Sequential(*build()[:1]))
    assert raised.value.findings == [
        "The model lacks 1.weight, 1.bias, 1.running_mean, 1.running_var, 1.num_batches_tracked and 12 more of the "
        "checkpoint. Build the model that was saved."
    ]


def test_another_optimizer_is_refused(run: Path, tmp_path: Path, victim: Victim) -> None:
    pipe, _ = victim
    names = dict(pipe.named_parameters())
    more = nn.Parameter(torch.ones(3))
    rest = "0.bias, 1.weight, 1.bias, 3.0.weight, 3.0.bias and 2 more"
    cases: list[tuple[torch.optim.Optimizer, str]] = [
        (torch.optim.SGD(names.values(), lr=1.0), "optimizer is a SGD, but a AdamW was saved."),
        (adamw([*names.values(), more]), "group 0 of the optimizer has parameters of shapes [[3]] that"),
        (adamw([names["0.weight"]]), f"optimizer lacks {rest}, which"),
    ]
    for optimizer, said in cases:
        (finding,) = refused(run, (pipe, optimizer))
        assert finding.startswith(said)
    gpipe.save(tmp_path / "bare", pipe)
    assert refused(tmp_path / "bare", victim) == [
        "The checkpoint has no optimizer state. Load it without an optimizer."
    ]
    gpipe.save(tmp_path / "part", pipe, adamw([names["0.weight"]]))
    (finding,) = refused(tmp_path / "part", victim)
    assert finding == f"group 0 of the optimizer has {rest}, which the saved optimizer did not have. Remove them."
    with pytest.raises(ValueError, match="optimizer cannot be loaded without its pipe"):
        gpipe.load(run, None, victim[1])


def test_tensors_that_differ_are_not_tied(tmp_path: Path) -> None:
    gpipe.save(tmp_path, make([nn.Linear(4, 4), nn.Linear(4, 4)], 2))
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[1].weight = layers[0].weight
    with pytest.raises(gpipe.CheckpointError) as raised:
        gpipe.load(tmp_path, make(layers, 2))
    assert raised.value.findings == [
        "1.weight and 0.weight are tied in the model, but differ in the files. Untie these parameters."
    ]


@pytest.mark.parametrize("at", range(len(FILES)))
def test_all_ranks_refuse_what_one_of_them_finds(at: int, run: Path, victim: Victim) -> None:
    path = run / "step_2" / FILES[at]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    pipes = rank_pipes(victim[0], 2)
    before = [snapshot(own, None) for own in pipes]
    raised = run_ranks(lambda own: gpipe.load(run, own, optimizer_of(*victim, own)), pipes)
    assert all(isinstance(error, gpipe.CheckpointError) for error in raised)
    assert len({str(error) for error in raised}) == 1
    assert [differences(snapshot(own, None), was) for own, was in zip(pipes, before, strict=True)] == [[]] * 4


def test_all_ranks_refuse_what_does_not_fit_one_of_them(run: Path, victim: Victim) -> None:
    pipes = rank_pipes(victim[0], 1)
    pipes[1].register_buffer("more", torch.ones(1))
    before = [snapshot(own, None) for own in pipes]
    raised = run_ranks(lambda own: gpipe.load(run, own), pipes)
    assert {str(error).splitlines()[1] for error in raised} == {
        "- The checkpoint lacks more. Build the model that was saved."
    }
    assert [differences(snapshot(own, None), was) for own, was in zip(pipes, before, strict=True)] == [[], []]


LEADS_OUT = ("../stage_0.safetensors", "/etc/passwd", "stage_0.pt", "..", "stage_0.safetensors/x")


def test_a_forged_manifest_is_refused(run: Path, victim: Victim) -> None:
    def of(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda fields: {key: change(fields[key]) for key, change in changes.items()}

    path = run / "step_2"
    original = (path / "manifest.json").read_bytes()
    for change, said in (
        (of(version=lambda _: 2), "version 2, but this gpipe reads 'gpipe checkpoint', version 1"),
        (of(extra=lambda _: {"$tensor": "gone"}), "extra needs gone, which no file contains"),
        (
            of(extra=lambda _: {"$run": "ls"}),
            "extra cannot be read: {'$run': 'ls'} is not a valid encoding",
        ),
        (of(extra=lambda _: {"$dict": [[[1], 2]]}), "extra cannot be read: unhashable type: 'list'"),
        (of(extra=lambda _: {"$dict": [1]}), "extra cannot be read: cannot unpack"),
        (of(extra=lambda _: {"$scalar": ["U8", 2**70]}), "extra cannot be read: "),
        *(
            (
                of(files=lambda files, name=name: {name: files["stage_0.safetensors"], **files}),
                f"names {name!r}, which",
            )
            for name in LEADS_OUT
        ),
        (of(names=lambda _: "0.weight"), "has wrong types in names"),
        (of(step_number=lambda _: True, ties=lambda _: None), "has wrong types in step_number, ties"),
        (of(optimizer=lambda one: {**one, "state": []}), "has wrong types in optimizer"),
        (of(files=lambda _: {"stage_0.safetensors": {"bytes": "9", "sha256": ""}}), "has wrong types in files"),
        (of(names=lambda names: names[1:]), "0.weight are not in both the manifest and the files"),
        (of(names=lambda names: [*names, "odd"]), "odd are not in both the manifest"),
    ):
        (path / "manifest.json").write_bytes(original)
        forge(path, change)
        assert said in "; ".join(refused(run, victim))
