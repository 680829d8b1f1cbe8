"""`gpipe doctor`, which says what a bug report needs and whether pipes work here."""

import json
from pathlib import Path

import pytest

from gpipe.cli import doctor
from gpipe.cli.main import main


def test_a_page_says_what_there_is_and_that_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--out", str(tmp_path / "page.json")])
    said, page = capsys.readouterr().out, json.loads((tmp_path / "page.json").read_text())
    assert end.value.code == 0, said
    assert said.endswith("All checks passed.\n")
    for part in ("installed", "machine", "devices", "environment", "checks"):
        for name, words in page[part].items():
            assert name in said
            assert words in said
    assert {"gpipe", "torch", "numpy"} <= set(page["installed"])
    assert "hypothesis" not in page["installed"]


@pytest.mark.parametrize(("value", "words"), [("1", "work, because"), (None, "fail by chance, because")])
def test_it_says_whether_torchrun_can_restart(
    value: str | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {})
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", value)
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert f"torchrun restarts     {words} TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in capsys.readouterr().out


def test_what_fails_is_named_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> str:
        raise OSError("the disk is full")

    monkeypatch.setattr(doctor, "CHECKS", {"works": lambda: "yes", "checkpoint": fails})
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    said = capsys.readouterr().out
    assert end.value.code == 1
    assert "FAILED: OSError: the disk is full (test_doctor.py:" in said
    assert "NCCL_DEBUG            INFO" in said
    assert said.endswith("1 of 2 checks failed: checkpoint\n")


def test_a_file_that_cannot_be_written_is_an_error_after_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"works": lambda: "yes"})
    missing = tmp_path / "missing" / "page.json"
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--out", str(missing)])
    found = capsys.readouterr()
    assert end.value.code == 2
    assert found.out.endswith("All checks passed.\n")
    assert found.err.startswith("gpipe: [Errno 2] No such file or directory")
    assert str(missing) in found.err
