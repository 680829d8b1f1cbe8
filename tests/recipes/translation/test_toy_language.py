"""A language is learnt, from a table to translations: the recipe as its users have it, by its commands."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpipe.cli.main import main
from gpipe.recipes.options.training import TranslationOptions
from gpipe.recipes.translation.corpus import Corpus
from tests.support.processes.fork_server import ONE_THREAD
from tests.support.toy_language import in_toy, job_of, options, pairs, train, write_table

EPOCHS = 10
LEARNT = 0.1  # nats a subword
UNTRAINED = 4.0  # nats a subword; as good as any word is ln 300 = 5.7


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> TranslationOptions:
    folder = tmp_path_factory.mktemp("toy")
    write_table(folder / "pairs.tsv", pairs(288))
    network = {"model_dim": 64, "heads": 4, "head_dim": 16, "ffn_dim": 128}
    learning = {"learning_rate": 6e-3, "warm_up": 30, "dropout": 0.0, "label_smoothing": 0.0, "epochs": EPOCHS}
    return options(folder, tokens=1000, micro_batches=2, **network, **learning)


@pytest.fixture(scope="module")
def run(given: TranslationOptions) -> Path:
    train(given)
    return given.out


def translated(run: Path, lines: list[str], *flags: str) -> list[str]:
    """What `gpipe translate` says of lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        patch.setattr(sys, "stdout", said := io.StringIO())
        main(["translate", "--run", str(run), *flags])
    return said.getvalue().splitlines()


def test_what_is_held_out_is_learnt_in_few_steps(given: TranslationOptions, run: Path) -> None:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == EPOCHS
    assert metrics[-1]["nll"] < LEARNT
    anew = job_of(options(run.parent, **{**vars(given), "out": run.parent / "anew"}))
    with anew.pipe, torch.no_grad():
        anew.pipe.eval()
        assert anew.recipe.measure(anew.pipe)["nll"] > UNTRAINED


@pytest.mark.parametrize("beam", ["1", "4"])
def test_most_sentences_that_training_has_not_seen_are_translated_rightly(
    beam: str, given: TranslationOptions, run: Path
) -> None:
    test = Corpus(given).split.test
    said = translated(run, [pair.source for pair in test], "--beam", beam)
    right = sum(one == pair.english for one, pair in zip(said, test, strict=True))
    assert right > 0.7 * len(test) > 10


def test_lines_are_translated_each_and_empty_ones_stay(run: Path) -> None:
    sentence = " ".join(map(in_toy, ("the", "old", "cat")))
    said = translated(run, ["", f"  {sentence}\t", "   ", sentence, *[sentence] * 70], "--partitions", "3")
    assert said[:4] == ["", said[1], "", said[1]]
    assert set(said[4:]) == {said[1]}
    assert len(said) == 74
    assert translated(run, []) == []
    for beam in ("1", "2"):
        assert translated(run, ["", " "], "--beam", beam) == ["", ""]


def test_what_stands_before_a_line_that_cannot_be_translated_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for odd, told in (
        (b"gr\xfcn", "stdin, line 3: byte 3 is not valid UTF-8"),
        (b"a" * 9000, "stdin, line 3: the sentence has"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join([b"", b"a", odd, b"b"]))))
        with pytest.raises(SystemExit) as ended:
            main(["translate", "--run", str(run)])
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert told in said.err
        assert len(said.out.splitlines()) == 2


def test_a_reader_that_has_enough_is_no_mistake(run: Path) -> None:
    command = [sys.executable, "-m", "gpipe", "translate", "--run", str(run), "--beam", "1"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **ONE_THREAD},
    ) as popen:
        assert popen.stdout is not None
        popen.stdout.close()
        _, told = popen.communicate(b"a\n" * 300)
    assert (popen.returncode, told) == (-signal.SIGPIPE, b"")


def test_a_run_translates_wherever_it_is_without_what_it_learnt_from(
    given: TranslationOptions, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its table, nor Django, nor the checkpoints are needed."""
    for missing in ("django", "polib", "sacrebleu"):
        monkeypatch.setitem(sys.modules, missing, None)
    expected = translated(run, [in_toy("cat")])
    moved = shutil.copytree(run, tmp_path / "moved", ignore=shutil.ignore_patterns("checkpoints"))
    assert given.tsv is not None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", lambda path: path != given.tsv and path.exists())
        assert translated(moved, [in_toy("cat")]) == expected


def test_an_evaluation_tells_of_every_language(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["evaluate", str(run), "--beam", "2", "--partitions", "3"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["language", "greedy", "toy", "mirror", "all"]
    assert max(map(len, shown)) <= 80
    found = json.loads((run / "evaluation.json").read_text())
    assert list(found["languages"]) == ["mirror", "toy"]
    assert found["languages"]["toy"]["chrf"] > 80 > 30 > found["languages"]["toy"]["copy_chrf"]
    assert found["nll"] < 2 * LEARNT
    assert found["beam"] == 2
