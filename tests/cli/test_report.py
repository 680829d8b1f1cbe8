"""`gpipe report`, which draws a run from what its folder holds."""

from pathlib import Path

import pytest

from gpipe.cli.main import main
from gpipe.profiling import Report, report_html, report_json
from tests.support.timelines import full

PICTURE = """\
three ranks
Rank 1 is slow.

predicted: 240 ms, 25.0% not computing
rank 0  F0 F1- F2 ..............R2 B2---- R1 B1---- R0 B0----
rank 1  ...F0- F1 F2- R2 B2---- R1 B1---- R0 B0---- ..........
ms      0          50          100        150        200

step 2 of 3: 320 ms, 25.0% not computing
rank 0  F0-- F1- F2-- ..................R2- B2------ R1-- B1------ R0- B0------
rank 1  .....F0- F1-- F2- R2-- B2------ R1- B1------ R0-- B0------ .............
ms      0          50          100        150        200        250         300
F forward   R recompute   B backward   . idle
"""
FULL = full(ranks=2, micro_batches=3, steps=3)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "report.json").write_text(report_json(FULL))
    return tmp_path


def test_the_page_is_written_and_its_path_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(run)])
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_text(encoding="utf-8") == report_html(FULL)


def test_text_is_drawn_in_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(run), "--text"])
    text = capsys.readouterr().out
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[: PICTURE.count("\n")] == PICTURE.splitlines()
    assert "100.0 %" in text
    assert [path.name for path in run.iterdir()] == ["report.json"]


def test_what_is_not_there_is_not_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.json").write_text(report_json(Report("[alone]")))
    main(["report", str(run), "--text"])
    assert capsys.readouterr().out == "[alone]\n"


def test_mistakes_are_told_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, text in (
        ("empty", ""),
        ("damaged", '{"format": "gpi'),
        ("older", '{"format": "gpipe report 0"}'),
        ("trace", "{}"),
    ):
        (tmp_path / folder).mkdir()
        if text:
            (tmp_path / folder / "report.json").write_text(text)
    for name, words in (
        ("nowhere", "contains no report.json. Pass the folder of a run that `gpipe train` has finished."),
        ("empty", "contains no report.json"),
        ("damaged", "report.json: cannot be read: Unterminated string"),
        ("older", "format: 'gpipe report 0' is not 'gpipe report 1'"),
        ("trace", "The file is not a report"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(tmp_path / name)])
        assert ended.value.code == 2
        assert f"gpipe: {tmp_path / name}" in (said := capsys.readouterr().err)
        assert words in said


def test_a_picture_in_place_of_the_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (run / "step.svg", run / "step.png"):
        main(["report", str(run), "--picture", str(file)])
        assert capsys.readouterr().out == f"{file}\n"
        assert file.stat().st_size > 1000
    assert not (run / "report.html").exists()


def test_a_picture_that_cannot_be_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, words in (
        (["step.gif"], "has the suffix '.gif'"),
        (["no/step.svg"], "No such file"),
        (["step.svg", "--text"], "--text: cannot be combined with --picture"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(run), "--picture", str(run / given[0]), *given[1:]])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
