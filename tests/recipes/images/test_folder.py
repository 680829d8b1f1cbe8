"""`gpipe train images` on a folder of one's own, and `gpipe evaluate` of what it has left."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpipe.cli.main import main
from tests.support.small_images import same, weights

CLASSES = ("ant", "bee", "cat", "dog", "eel", "fly")
EACH = 6  # of which the fifth is held out
SMALL = ("--filters", "16", "--image-size", "16", "--batch-size", "8", "--micro-batches", "2", "--steps", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("animals")
    for number, name in enumerate(CLASSES):
        (root / name).mkdir()
        for i in range(EACH):
            pixels = np.random.default_rng((number, i)).integers(0, 256, (18 + i, 25 - number, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def trained(folder: Path, out: Path, *given: str, workers: int = 0) -> list[dict[str, Any]]:
    told = ("--image-folder", str(folder), "--out", str(out), "--workers", str(workers))
    main(["train", "images", *told, *SMALL, "--crop", "0.3", "--flip", "--cutout", "4", *given])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run, and the lines of its epochs."""
    out = tmp_path_factory.mktemp("run")
    return out, trained(folder, out)


def test_neither_workers_nor_partitions_change_bits(
    folder: Path, run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    assert trained(folder, tmp_path, "--partitions", "3", workers=2) == run[1]
    assert same(weights(tmp_path), weights(run[0]))


def test_an_evaluation_counts_each_held_out_image_once(
    run: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, lines = run
    for k in ("1", "3"):
        main(["evaluate", str(out), "--partitions", k])
        found = json.loads((out / "evaluation.json").read_text())
        assert (found["images"], found["classes"]) == (len(CLASSES), [*CLASSES])
        assert [sum(row) for row in found["confusion"]] == [1] * len(CLASSES)
        hits = sum(row[number] for number, row in enumerate(found["confusion"]))
        assert found["top1"] == hits / len(CLASSES) == lines[-1]["accuracy"]
        assert found["top1"] <= found["top5"] <= 1
    said = capsys.readouterr().out
    assert said.count("Accuracy on 6 held-out images:\n") == 2
    assert said.count("true \\ predicted  ant  bee  cat  dog  eel  fly\n") == 2
    assert f"top-1 {found['top1']:.2%}, top-5 {found['top5']:.2%}" in said


def test_of_several_runs_the_mean_and_the_spread_are_told(
    folder: Path, run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(folder, tmp_path, "--seed", "1", "--classes", "bee", "ant", "--per-class", "5")
    capsys.readouterr()
    main(["evaluate", str(run[0]), str(tmp_path)])
    said = capsys.readouterr().out
    one, two = (json.loads((out / "evaluation.json").read_text())["top1"] for out in (run[0], tmp_path))
    assert said.count("held-out images") == 2
    assert "2 runs: mean and standard deviation\n" in said
    assert f"top1  {(one + two) / 2:.4f} +- {abs(one - two) / 2**0.5:.4f}\n" in said


def test_what_cannot_be_used_ends_with_what_to_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, images = ["--out", str(tmp_path / "out")], ["train", "images", "--image-folder", str(folder)]
    for given, told in (
        ([*images, "--classes", "ant", "yak", *out], "Class yak does not exist. Choose from ant, bee, cat"),
        ([*images, "--batch-size", "31", *out], "--batch-size: 31 is more than the 30 training images"),
        (["evaluate"], "RUN: got no folder"),
        (["evaluate", str(tmp_path)], "contains no config.toml"),
        (["evaluate", str(tmp_path), "--beam", "0"], "--beam: 0 is out of range"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(given)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_turns_out_damaged_in_training_is_named(
    workers: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "images")
    bad = tmp_path / "images" / "ant" / "0.png"
    bad.write_bytes(bad.read_bytes()[:-40])
    with pytest.raises(SystemExit) as ended:
        trained(tmp_path / "images", tmp_path / "out", "--steps", "4", workers=workers)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"gpipe: {bad}: cannot be read as an image: ")
    assert "Traceback" not in said


def test_damaged_weights_end_an_evaluation_with_their_name(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run[0], tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"gpipe: {tmp_path / 'run' / 'model.safetensors'}: cannot be read: ")
