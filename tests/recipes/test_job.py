import json
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from gpipe.models import amoebanet_d
from gpipe.profiling import read_report
from gpipe.recipes.images import DigitsRecipe
from gpipe.recipes.prepare import Progress, locked, prepare
from gpipe.recipes.training import run
from gpipe.recipes.world import World
from tests.support.small_images import OPTIONS, prepared, same, shown, train, weights


def test_the_files_tell_what_happened(tmp_path: Path) -> None:
    options = replace(OPTIONS, out=tmp_path / "deep" / "out")
    epochs, text = train(options)
    lines = [json.loads(line) for line in (options.out / "metrics.jsonl").read_text().splitlines()]
    assert lines == [epoch.line() for epoch in epochs]
    plain = torch.nn.Sequential(*amoebanet_d(3, 16, 3))
    plain.load_state_dict(weights(options.out))
    ElementTree.fromstring((options.out / "timeline.svg").read_text())
    slices = json.loads((options.out / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in slices} == {0, 1}
    assert {"0F0", "1F1", "0B0", "1R1", "data", "weight update"} <= {event["name"] for event in slices}
    report = read_report((options.out / "report.json").read_text())
    assert (report.title, report.losses) == (text.splitlines()[0], tuple(epoch.loss for epoch in epochs))
    assert len(slices) == 2 * 2 + sum(len(step.spans) + 2 * len(step.other) for step in report.timelines)
    assert (report.predicted, report.configuration["partitions"]) == (None, 2)  # its costs are no seconds
    assert f"gpipe report {options.out}" in text
    assert "100.0 %" in text
    assert "with equal stages" in text
    assert "one partition after the other" in text
    assert "\x1b" not in text
    terminal = train(options, terminal=True)[1]
    assert "\x1b" in terminal
    assert "left" in terminal  # the time


def test_the_seed_decides_and_torchs_own_randomness_does_not(tmp_path: Path) -> None:
    texts = []
    for seed, ambient in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(ambient)
        state = torch.get_rng_state()
        texts.append(shown(train(replace(OPTIONS, seed=seed, out=tmp_path))[1]))
        assert torch.equal(state, torch.get_rng_state())
    assert texts[0] == texts[1] != texts[2]


def test_steps_end_a_training_within_an_epoch(tmp_path: Path) -> None:
    epochs, _ = train(replace(OPTIONS, steps=3, out=tmp_path))
    assert [epoch.epoch for epoch in epochs] == [1, 2]
    job = prepared(replace(OPTIONS, steps=3, out=tmp_path, resume=True))
    assert (job.steps_of(1), job.steps_of(2), job.pipe.step_number) == (2, 1, 3)


def test_options_that_cannot_be_leave_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--partitions: 0 is out of range"):
        prepared(replace(OPTIONS, partitions=0, out=tmp_path / "out"))
    with pytest.raises(ValueError, match="--batch-size: 19 is more than the 18 training images"):
        prepared(replace(OPTIONS, batch_size=19, out=tmp_path / "out"))
    with pytest.raises(ValueError, match="partitions=5 has 10 stages, but there are only 9 layers"):
        prepared(replace(OPTIONS, partitions=5, schedule="zb_v", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out: .* cannot be created: Not a directory"):
        prepared(replace(OPTIONS, out=tmp_path / "file" / "out"))
    with pytest.raises(ValueError, match=r"--out: .* cannot be created: File exists"):
        prepared(replace(OPTIONS, out=tmp_path / "file"))


def test_a_run_that_torchrun_starts_anew_begins_where_nothing_was_saved(tmp_path: Path) -> None:
    recipe = DigitsRecipe(replace(OPTIONS, out=tmp_path).resolved())
    assert prepare(recipe, World(restarts=1), measure=False).progress == Progress()


def test_checkpoints_of_an_earlier_run_are_put_aside_and_its_evaluation_is_removed(tmp_path: Path) -> None:
    options = replace(OPTIONS, out=tmp_path)
    text = train(options)[1]
    (tmp_path / "checkpoints" / "mark").touch()
    (tmp_path / "evaluation.json").touch()
    assert train(replace(options, seed=1))[1] != text
    assert (tmp_path / "checkpoints.old" / "mark").exists()
    assert not (tmp_path / "checkpoints" / "mark").exists()
    assert not (tmp_path / "evaluation.json").exists()


def test_a_run_that_had_ended_is_gone_on_with_to_the_same_files(tmp_path: Path) -> None:
    options = replace(OPTIONS, out=tmp_path)
    epochs, _ = train(options)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    (tmp_path / "model.safetensors").unlink()
    again, text = train(replace(options, resume=True))
    assert again == epochs
    assert "Resuming after epoch 1 from" in text
    assert "Training has already finished." in text
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_folder_that_is_named_from_here_keeps_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(replace(OPTIONS, out=Path("out"), ema=0.5))
    assert {path.name for path in Path("out").iterdir()} >= {"checkpoints", "model.safetensors"}
    assert not Path("out/averages").exists()
    assert "Resuming after epoch 1" in train(replace(OPTIONS, out=Path("out"), ema=0.5, resume=True))[1]
    train(replace(OPTIONS, out=Path("plain")))
    assert Path("plain/checkpoints/latest").exists()


def test_weights_without_a_checkpoint_are_not_trained_anew_by_resume(tmp_path: Path) -> None:
    train(replace(OPTIONS, out=tmp_path))
    shutil.rmtree(tmp_path / "checkpoints")
    before = weights(tmp_path)
    with pytest.raises(ValueError, match="contains final weights but no checkpoint"):
        prepared(replace(OPTIONS, out=tmp_path, resume=True))
    assert same(weights(tmp_path), before)


def test_a_process_of_torchrun_must_have_met_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, RuntimeError), match="init_process_group"):
        prepared(replace(OPTIONS, out=tmp_path))


def test_a_checkpoint_is_saved_after_every_so_many_epochs_and_two_stay(tmp_path: Path) -> None:
    train(replace(OPTIONS, out=tmp_path, epochs=3, checkpoint_every=2))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_4", "step_6"]


def test_a_folder_is_for_one_training_at_a_time(tmp_path: Path) -> None:
    options = replace(OPTIONS, out=tmp_path)
    job = prepared(options)
    before = sorted(path.name for path in tmp_path.iterdir())
    with locked(tmp_path, World()):
        for second in (lambda: prepared(options), lambda: run(job)):
            with pytest.raises(ValueError, match="is in use by a running training"):
                second()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    run(job)
