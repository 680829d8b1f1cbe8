import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import gpipe
from gpipe.cli.main import main
from gpipe.recipes import prepare, training
from gpipe.recipes.options.images import DigitsOptions
from gpipe.recipes.options.training import TrainOptions
from gpipe.recipes.recipe import Recipe


def test_options_reach_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[TrainOptions] = []

    def noted(recipe: Recipe[TrainOptions], world: object) -> None:
        told.append(recipe.options)

    monkeypatch.setattr(prepare, "prepare", noted)
    monkeypatch.setattr(training, "run", lambda prepared: None)
    main(["train", "digits", "--partitions", "3", "--remat", "never", "--out", str(tmp_path)])
    assert told == [DigitsOptions(partitions=3, remat="never", out=tmp_path)]


def test_mistakes_end_with_status_2_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", "--partitions", "0", "--epochs", "0"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error == "gpipe: --partitions is 0: choose 1 or more\n       --epochs is 0: choose 1 or more\n"


def test_a_missing_library_ends_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits"])
    assert ended.value.code == 2
    assert "pip install 'gpipe[digits]'" in capsys.readouterr().err


def test_ctrl_c_ends_with_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "prepare", interrupted)
    ignored: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: ignored.append(arguments))
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "gpipe: interrupted\n"
    assert ignored == [(signal.SIGINT, signal.SIG_IGN)]


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(prepare, "prepare", lambda recipe, world: None)
    monkeypatch.setattr(training, "run", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["train", "digits"])


def test_the_module_is_the_command_and_its_version_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "gpipe", "train", "--help"]
    assert "usage: gpipe train" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    main(["--version"])
    assert capsys.readouterr().out == f"gpipe {gpipe.__version__}\n" == f"gpipe {metadata.version('gpipe')}\n"
