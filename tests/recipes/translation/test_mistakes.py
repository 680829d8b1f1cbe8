"""Mistakes end the commands with status 2, and with what to do."""

import sys
from pathlib import Path

import pytest

from gpipe.cli.main import main
from gpipe.recipes.options.files import write_config
from gpipe.recipes.options.images import DigitsOptions
from tests.support.toy_language import job_of, options


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says of a mistake."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gpipe: ")
    return captured.err


@pytest.fixture
def untrained(tmp_path: Path) -> Path:
    """The folder of a run that has not taken a step."""
    job = job_of(options(tmp_path))
    job.pipe.close()
    return job.options.out


@pytest.mark.parametrize("command", [("translate", "--run"), ("evaluate",)], ids=str)
def test_a_run_must_be_there_and_have_weights(
    command: tuple[str, ...], untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = tmp_path / "none"
    assert told(capsys, *command, str(none)) == (
        f"gpipe: {none} has no config.toml: give the folder of a run, such as `gpipe train` writes\n"
    )
    assert "has neither model.safetensors nor a checkpoint: give the folder of a run that was trained" in told(
        capsys, *command, str(untrained)
    )
    assert "--beam is 0: choose 1 or more" in told(capsys, *command, str(untrained), "--beam", "0")
    assert "--partitions is 6, but --layers 1 makes 5 layers: choose 5 or fewer" in told(
        capsys, *command, str(untrained), "--partitions", "6"
    )


def test_digits_are_not_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "digits", DigitsOptions())
    assert told(capsys, "translate", "--run", str(tmp_path)) == (
        f"gpipe: {tmp_path} is a run of the recipe digits: give one of `gpipe train translation`\n"
    )
    assert "--beam says nothing to the recipe digits" in told(capsys, "evaluate", str(tmp_path), "--beam", "2")


def test_a_run_without_its_vocabulary_is_not_given_another(
    untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (untrained / "vocabulary.json").unlink()
    assert "has no vocabulary.json" in told(capsys, "translate", "--run", str(untrained))


def test_all_options_that_cannot_be_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "--layers": "0",
        "--vocabulary": "100",
        "--temperature": "0",
        "--learning-rate": "inf",
        "--clip-logits": "-1",
        "--dropout": "1",
        "--beam": "0",
        "--model-dim": "33",
        "--tokens": "100",
        "--tsv": str(tmp_path / "none.tsv"),
    }
    said = told(capsys, "train", "translation", *(word for flag in wrong.items() for word in flag))
    assert all(flag in said for flag in wrong)
    assert len(said.splitlines()) == len(wrong)
    assert "--tokens is 100: choose 204 or more, for a pair of --longest each" in said
    heads = told(capsys, "train", "translation", "--model", "decoder", "--heads", "3")
    assert heads == "gpipe: --model-dim is 128: choose a multiple of 3, --heads\n"


@pytest.mark.parametrize(
    ("missing", "what"),
    [
        ("django", "the translations come with Django and are read by polib"),
        ("polib", "the translations come with Django and are read by polib"),
        ("tokenizers", "vocabularies are learnt by tokenizers"),
    ],
)
def test_training_says_which_library_is_missing(
    missing: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    said = told(capsys, "train", "translation", "--out", str(tmp_path / "out"))
    assert said == f"gpipe: {what}: pip install 'gpipe[translation]'\n"
    assert not (tmp_path / "out").exists()


def test_an_evaluation_says_which_library_is_missing_before_it_translates(
    untrained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setattr("gpipe.recipes.trained.read_weights", lambda run: {})
    monkeypatch.setattr("gpipe.recipes.trained.load", lambda state, layers: None)
    assert told(capsys, "evaluate", str(untrained)) == (
        "gpipe: translations are scored by sacrebleu: pip install 'gpipe[translation]'\n"
    )


def test_translating_says_that_tokenizers_are_missing(
    untrained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'gpipe[translation]'" in told(capsys, "translate", "--run", str(untrained))
