import errno
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import gpipe
from gpipe.cli.main import main
from gpipe.profiling import Report, report_json
from gpipe.recipes import prepare, training


def test_a_missing_library_ends_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits"])
    assert ended.value.code == 2
    assert "pip install '.[digits]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("train digit", "'digit' is not a command of `gpipe train`. Did you mean `gpipe train digits`?"),
        ("trian digits", "'trian' is not a command of `gpipe`. Did you mean `gpipe train`?"),
        ("train xyz", "'xyz' is not a command of `gpipe train`. Choose one of digits, images, translation."),
    ],
)
def test_a_mistyped_command_is_told_the_closest_one(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"gpipe: {said}\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("train digits --partitions two", "--partitions: 'two' is not an integer."),
        ("train digits --micro-batches 1.5", "--micro-batches: '1.5' is not an integer."),
        ("train images --learning-rate fast", "--learning-rate: 'fast' is not a number."),
        ("plan unet -k two", "'two' is not an integer."),
        ("schedule gpipe --rank x", "'x' is not an integer."),
    ],
)
def test_a_word_for_a_number_is_told_without_types_of_python(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Annotated" not in error


def test_a_full_disk_ends_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(prepare, "prepare", lambda recipe, world: None)
    monkeypatch.setattr(training, "run", full)
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", "--out", str(tmp_path)])
    assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "gpipe: model.safetensors: No space left on device. Free space, and resume from the last checkpoint with"
    )
    assert second.strip() == f"gpipe train digits --out {tmp_path} --resume"


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


@pytest.mark.parametrize(
    "command", ["train digits", "evaluate", "translate", "schedule", "report", "record", "plan", "doctor", "explain"]
)
def test_the_help_of_a_command_ends_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    options, _, examples = capsys.readouterr().out.partition("\nExamples:\n")
    assert "None" not in options
    assert examples
    assert all(f"gpipe {command}" in line for line in examples.splitlines())


def test_commands_start_without_torch_where_nothing_is_trained(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(report_json(Report("alone")))
    for given in (
        ["plan", "resnet"],
        ["schedule", "gpipe"],
        ["report", str(tmp_path)],
        ["train", "digits", "--help"],
    ):
        code = f"import sys\nfrom gpipe.cli.main import main\ntry: main({given!r})\nexcept SystemExit: pass\n"
        code += "assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True)
