import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from gpipe.datasets import Digits, load_digits
from gpipe.models import amoebanet_d
from gpipe.recipes import digits as job
from gpipe.recipes.options import TrainOptions
from gpipe.recipes.plain import measure_plain_step
from gpipe.recipes.progress import Epoch, Progress
from gpipe.recipes.recipe import Recipe
from gpipe.recipes.world import World
from gpipe.report import read_report

OPTIONS = TrainOptions(filters=16, micro_batches=2, epochs=1)


@pytest.fixture(scope="module")
def few() -> Digits:
    digits = load_digits(size=32)
    return Digits(train=digits.train[:18], held_out=digits.held_out[:6])


def train(options: TrainOptions, digits: Digits, *, terminal: bool = False) -> tuple[list[Epoch], str]:
    file = io.StringIO()
    prepared = job.prepare(options, Recipe(batch_size=8), digits, costs=[1.0] * 9)
    return job.run(prepared, Console(file=file, width=80, force_terminal=terminal)), file.getvalue()


def losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("epoch")]


@pytest.mark.slow
def test_every_number_of_partitions_prints_the_same_losses(few: Digits, tmp_path: Path) -> None:
    options = replace(OPTIONS, epochs=2)
    texts = [train(replace(options, partitions=k, out=tmp_path / str(k)), few)[1] for k in (1, 2, 3)]
    assert losses(texts[0]) == losses(texts[1]) == losses(texts[2])
    assert len(losses(texts[0])) == 2
    weights = [load_file(tmp_path / str(k) / "model.safetensors") for k in (1, 2, 3)]
    assert all(torch.equal(value, other[name]) for other in weights[1:] for name, value in weights[0].items())


def test_the_files_tell_what_happened(few: Digits, tmp_path: Path) -> None:
    options = replace(OPTIONS, out=tmp_path / "deep" / "out")
    epochs, text = train(options, few)
    lines = [json.loads(line) for line in (options.out / "metrics.jsonl").read_text().splitlines()]
    assert lines == [vars(epoch) for epoch in epochs]
    plain = torch.nn.Sequential(*amoebanet_d(3, 16, 10))
    plain.load_state_dict(load_file(options.out / "model.safetensors"))
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
    assert "plain loop" in text


def test_a_log_has_no_control_characters_and_a_terminal_shows_the_time_left(few: Digits, tmp_path: Path) -> None:
    options = replace(OPTIONS, out=tmp_path)
    assert "\x1b" not in train(options, few)[1]
    terminal = train(options, few, terminal=True)[1]
    assert "\x1b" in terminal
    assert "left" in terminal


@pytest.mark.slow
def test_the_seed_decides_and_torchs_own_randomness_does_not(few: Digits, tmp_path: Path) -> None:
    texts = []
    for seed, ambient in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(ambient)
        state = torch.get_rng_state()
        texts.append(losses(train(replace(OPTIONS, seed=seed, out=tmp_path), few)[1]))
        assert torch.equal(state, torch.get_rng_state())
    assert texts[0] == texts[1] != texts[2]


def test_the_plain_loop_is_timed_on_layers_of_its_own(few: Digits) -> None:
    made: list[list[nn.Module]] = []

    def make() -> list[nn.Module]:
        made.append(amoebanet_d(3, 16, 10))
        return made[-1]

    threads, state = torch.get_num_threads(), torch.get_rng_state()
    seconds = measure_plain_step(make, few.train[:8], 4, torch.nn.functional.cross_entropy, torch.device("cpu"))
    assert seconds > 0
    assert len(made) == 1
    assert (torch.get_num_threads(), torch.equal(torch.get_rng_state(), state)) == (threads, True)


@pytest.mark.slow
def test_a_plan_that_was_measured_prints_the_losses_of_the_paper(few: Digits, tmp_path: Path) -> None:
    paper = train(replace(OPTIONS, paper=True, out=tmp_path / "paper"), few)[1]
    planned = job.prepare(replace(OPTIONS, plan="auto", out=tmp_path / "auto"), Recipe(batch_size=8), few)
    file = io.StringIO()
    job.run(planned, Console(file=file, width=80))
    assert losses(file.getvalue()) == losses(paper)
    assert "planned for this machine" in file.getvalue()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"plan": "auto", "schedule": "1f1b"}, "--plan auto chooses --schedule itself"),
        ({"paper": True, "remat": "never"}, "leave --remat out, or --paper"),
        ({"paper": True, "plan": "auto"}, "leave --plan out, or --paper"),
    ],
)
def test_what_a_plan_says_cannot_be_said_beside_it(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        replace(OPTIONS, **changes).check()


def test_options_that_cannot_be_leave_no_folder(few: Digits, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--partitions is 0"):
        job.prepare(replace(OPTIONS, partitions=0, out=tmp_path / "out"), digits=few)
    assert not (tmp_path / "out").exists()


def test_a_run_that_torchrun_starts_anew_begins_where_nothing_was_saved(few: Digits, tmp_path: Path) -> None:
    prepared = job.prepare(
        replace(OPTIONS, out=tmp_path, resume=True), Recipe(batch_size=8), few, [1.0] * 9, World(restarts=1)
    )
    assert prepared.progress == Progress()


def test_checkpoints_of_an_earlier_run_are_put_aside(few: Digits, tmp_path: Path) -> None:
    options = replace(OPTIONS, out=tmp_path)
    text = train(options, few)[1]
    (tmp_path / "checkpoints" / "mark").touch()
    assert train(replace(options, seed=1), few)[1] != text
    assert (tmp_path / "checkpoints.old" / "mark").exists()
    assert not (tmp_path / "checkpoints" / "mark").exists()


def test_a_run_that_had_ended_is_gone_on_with_to_the_same_files(few: Digits, tmp_path: Path) -> None:
    options = replace(OPTIONS, out=tmp_path)
    epochs, _ = train(options, few)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    (tmp_path / "model.safetensors").unlink()
    again, text = train(replace(options, resume=True), few)
    assert again == epochs
    assert "goes on after epoch 1, from" in text
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_checkpoint_is_saved_after_every_so_many_epochs_and_two_stay(few: Digits, tmp_path: Path) -> None:
    train(replace(OPTIONS, out=tmp_path, epochs=3, checkpoint_every=2), few)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_4", "step_6"]
