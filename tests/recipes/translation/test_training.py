"""Training gives the same numbers for every K, also after it was left, and starts from another run's weights."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from gpipe.recipes.options.training import TranslationOptions
from gpipe.recipes.prepare import prepare
from gpipe.recipes.training import run
from gpipe.recipes.translation.recipe import VOCABULARY, TranslationRecipe
from tests.support.small_images import same
from tests.support.toy_language import job_of, options, pairs, steps_of, train, write_table

WEIGHTS = "model.safetensors"


def metrics(folder: Path) -> list[list[float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[line["epoch"], line["loss"], line["nll"]] for line in lines]


def check_same(left: Path, right: Path) -> None:
    assert metrics(left) == metrics(right)
    assert same(load_file(left / WEIGHTS), load_file(right / WEIGHTS))


NETWORKS: list[dict[str, Any]] = [
    *({"matrices": matrices} for matrices in (1, 2, 3)),
    *({"model": "decoder", "matrices": matrices} for matrices in (2, 3)),
]


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_every_number_of_partitions_gives_the_same_losses_and_weights(
    network: dict[str, Any], tmp_path: Path
) -> None:
    """Dropout, padding and a mini-batch of fewer sentences than micro-batches included."""
    found = []
    for k in (1, 2, 3):
        job = job_of(options(tmp_path, partitions=k, out=tmp_path / str(k), clip_norm=1.0, **network))
        with job.pipe:
            losses = steps_of(job, 3)
            found.append((losses, {name: value.clone() for name, value in job.pipe.state_dict().items()}))
    (losses, weights), *others = found
    assert len(losses) == 3
    for other_losses, other_weights in others:
        assert other_losses == losses
        assert same(other_weights, weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> TranslationOptions:
    """A training of 13 steps that nobody disturbed, of which the last are of a second epoch."""
    given = options(folder, steps=13, out=folder / "whole")
    assert job_of(given).recipe.steps_per_epoch == 11
    train(given)
    return given


@pytest.mark.parametrize("steps", [4, 12])
def test_more_steps_later_give_what_they_give_at_once(
    steps: int, whole: TranslationOptions, folder: Path, tmp_path: Path
) -> None:
    """Also where the first ones end within an epoch, and with other partitions afterwards."""
    out = tmp_path / "out"
    train(options(folder, steps=steps, out=out))
    train(options(folder, steps=13, out=out, resume=True, partitions=3))
    check_same(out, whole.out)


def test_another_training_is_not_gone_on_with(whole: TranslationOptions, folder: Path, tmp_path: Path) -> None:
    other = write_table(tmp_path / "other.tsv", pairs(100))
    resumed = {"out": whole.out, "resume": True}
    started = {"out": tmp_path / "out", "from_": whole.out}
    for changes, told in (
        ({**resumed, "label_smoothing": 0.5}, "--label-smoothing: 0.5 differs from 0.1 in the checkpoint"),
        ({**resumed, "tsv": other}, "--resume: the training data has changed"),
        ({**resumed, "steps": 12}, "--resume: the run has already trained 13 steps, but this training has only 12"),
        ({**started, "vocabulary": 500}, "--vocabulary: 500 differs from 300 in the run of --from"),
        ({**started, "from_": tmp_path}, "contains neither model.safetensors nor a checkpoint"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            job_of(options(folder, **changes))


def test_a_plan_that_was_measured_gives_the_same_losses(whole: TranslationOptions, tmp_path: Path) -> None:
    """Mini-batches of sentences are of any size, and a plan is for equal parts."""
    told = replace(whole, out=tmp_path, plan="auto", partitions=2).resolved()
    job = prepare(TranslationRecipe(told))
    assert job.name.endswith("planned for this machine")
    run(job, Console(quiet=True))
    assert same(load_file(tmp_path / WEIGHTS), load_file(whole.out / WEIGHTS))


def test_a_run_that_starts_from_another_has_its_vocabulary_and_weights(
    whole: TranslationOptions, tmp_path: Path
) -> None:
    """Also where it is said to be resumed, though it had not begun."""
    other = [pair for pair in pairs(200) if pair.language == "mirror"]
    table = write_table(tmp_path / "other.tsv", other)
    for resume in (False, True):
        given = options(tmp_path, tsv=table, out=tmp_path / str(resume), from_=whole.out, resume=resume)
        job = job_of(given)
        assert same(job.pipe.state_dict(), load_file(whole.out / WEIGHTS))
        assert (given.out / VOCABULARY).read_bytes() == (whole.out / VOCABULARY).read_bytes()
        job.pipe.close()
    anew = job_of(options(tmp_path, tsv=table, out=tmp_path / "anew"))
    anew.pipe.close()
    assert (anew.options.out / VOCABULARY).read_bytes() != (whole.out / VOCABULARY).read_bytes()
