"""Mistakes end the commands with status 2, and with what to do."""

import sys
from pathlib import Path

import pytest

from gpipe.cli.main import main
from gpipe.recipes.options.files import write_config
from gpipe.recipes.options.training import DigitsOptions
from tests.support.toy_language import job_of, options, pairs, write_table


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


def test_a_run_must_be_there_and_have_weights(
    untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = tmp_path / "none"
    for command in (("translate", "--run"), ("evaluate",)):
        for given, words in (
            ((none,), f"{none}: contains no config.toml. Pass the folder of a run that `gpipe train` wrote.\n"),
            ((untrained,), "contains neither model.safetensors nor a checkpoint. Pass"),
            ((untrained, "--beam", "0"), "--beam: 0 is out of range"),
        ):
            assert words in told(capsys, *command, *map(str, given))
    (untrained / "vocabulary.json").unlink()
    assert "contains no vocabulary.json" in told(capsys, "translate", "--run", str(untrained))


def test_digits_are_not_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "digits", DigitsOptions())
    assert told(capsys, "translate", "--run", str(tmp_path)) == (
        f"gpipe: --run: {tmp_path} is a run of the recipe digits. Pass a run of `gpipe train translation`.\n"
    )
    assert "--beam: " in told(capsys, "evaluate", str(tmp_path), "--beam", "2")


def test_all_options_that_cannot_be_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "--layers 0 --vocabulary 100 --temperature 0 --learning-rate inf --clip-logits -1 --dropout 1 --beam 0"
    flags = f"{wrong} --tokens 100".split()
    said = told(capsys, "train", "translation", *flags)
    assert all(flag in said for flag in flags[::2])
    assert len(said.splitlines()) == len(flags) // 2
    assert "--tokens: 100 is too small for two sentences of --longest. Choose at least 204." in said
    out, none = ("--out", str(tmp_path / "out")), str(tmp_path / "none.tsv")
    assert "No such file or directory" in told(capsys, "train", "translation", *out, "--tsv", none)
    table = ("--tsv", str(write_table(tmp_path / "pairs.tsv", pairs(120))))
    heads = told(capsys, "train", "translation", "--model", "decoder", "--heads", "3", *out, *table)
    assert "layers=2, model_dim=128, heads=3 are not a Transformer" in heads


@pytest.mark.parametrize(
    ("missing", "what"),
    [
        ("django", "The default translations require Django and polib"),
        ("polib", "The default translations require Django and polib"),
        ("tokenizers", "Vocabularies require the library tokenizers"),
        ("sacrebleu", "Scoring translations requires sacrebleu"),
    ],
)
def test_the_library_that_is_missing_is_named_before_hours_of_work(
    missing: str, what: str, untrained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = untrained.parent / "other"
    command = ["train", "translation", "--out", str(out)]
    if missing == "sacrebleu":
        monkeypatch.setattr("gpipe.recipes.trained.read_weights", lambda run: {})
        monkeypatch.setattr("gpipe.recipes.trained.load", lambda state, layers: None)
        command = ["evaluate", str(untrained)]
    monkeypatch.setitem(sys.modules, missing, None)
    assert (
        told(capsys, *command)
        == f"gpipe: {what}. Run pip install '.[translation]' in a clone of the gpipe repository.\n"
    )
    if missing == "tokenizers":
        assert "pip install '.[translation]'" in told(capsys, "translate", "--run", str(untrained))
    assert not out.exists()
