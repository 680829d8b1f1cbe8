"""A run that starts from another's weights, on other classes."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpipe.cli.main import main
from tests.support.small_images import EVERYTHING, OPTIONS, prepared, same, train, weights

SOFTMAX = {"8.linear.weight", "8.linear.bias"}
AUXILIARY = {"5.auxiliary.9.weight", "5.auxiliary.9.bias"}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 0, 1 and 2, with an auxiliary head."""
    out = tmp_path_factory.mktemp("first")
    train(replace(EVERYTHING, out=out))
    return out


def test_all_weights_stay_but_those_of_the_softmax_layers(first: Path, tmp_path: Path) -> None:
    """The averaged ones; also at another number of partitions, and of classes."""
    told = replace(EVERYTHING, partitions=3, classes=("5", "9"), per_class=9, from_=first, out=tmp_path)
    begun = prepared(told)
    before, after = weights(first), begun.pipe.state_dict()
    assert begun.recipe.steps_per_epoch == 2
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == SOFTMAX | AUXILIARY
    assert all(len(after[name]) == 2 for name in SOFTMAX | AUXILIARY)
    again, other = (prepared(replace(told, seed=seed, partitions=1)).pipe.state_dict() for seed in (0, 8))
    for name in SOFTMAX | AUXILIARY:  # of the seed
        assert torch.equal(after[name], again[name])
        assert not torch.equal(after[name], other[name])


def test_the_command_takes_the_network_of_the_run_and_trains(first: Path, tmp_path: Path) -> None:
    given = ("--classes", "3", "4", "--per-class", "4", "--batch-size", "8", "--micro-batches", "2", "--steps", "1")
    main(["train", "digits", "--from", str(first), *given, "--out", str(tmp_path / "out")])
    assert weights(tmp_path / "out")["8.linear.weight"].shape[0] == 2
    main(["evaluate", str(tmp_path / "out")])


def test_another_network_is_told_with_what_does_not_fit(first: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights: the run contains a different model") as refusal:
        prepared(replace(EVERYTHING, filters=32, from_=first, out=tmp_path / "out"))
    lines = str(refusal.value).splitlines()
    assert len(lines) == 12
    assert all(": " in line and " in the run, " in line for line in lines[1:-1])
    assert lines[-1].startswith("and ")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"5\.auxiliary\.\d+\.bias: \d+ in the run, missing here"):
        prepared(replace(EVERYTHING, aux_head=0.0, from_=first, out=tmp_path / "out"))


def test_a_run_that_was_left_gives_the_weights_of_its_latest_checkpoint(tmp_path: Path) -> None:
    train(replace(OPTIONS, out=tmp_path / "first"))
    expected = weights(tmp_path / "first")
    (tmp_path / "first" / "model.safetensors").unlink()
    after = prepared(replace(OPTIONS, from_=tmp_path / "first", out=tmp_path / "out")).pipe.state_dict()
    assert {name for name in after if not torch.equal(after[name], expected[name])} == SOFTMAX


def test_a_run_goes_on_when_the_one_it_came_from_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And may be evaluated before it ends."""
    came_from = tmp_path / "first"
    train(replace(OPTIONS, out=came_from))
    told = replace(OPTIONS, from_=came_from, epochs=2, out=tmp_path / "out")
    train(told)
    expected = weights(tmp_path / "out")
    shutil.rmtree(came_from)
    (tmp_path / "out" / "model.safetensors").unlink()
    main(["evaluate", str(tmp_path / "out")])
    assert "Training has not finished" in capsys.readouterr().out
    train(replace(told, resume=True))
    assert same(weights(tmp_path / "out"), expected)
