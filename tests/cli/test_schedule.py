"""`gpipe schedule`, which draws a schedule in the terminal, into a file, or beside another."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpipe.cli.main import main
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import program_of

ONE_F_ONE_B = """\
1f1b: 2 ranks, 3 micro-batches
rank 0  F0 F1 .. .. B0--- F2 B1--- .. B2---
rank 1  .. F0 B0--- F1 B1--- F2 B2--- .. ..
time    0              5              10
bubble over all ranks: 25.0% (the busiest rank works 9 of 12 units)
peak activations in micro-batches: 2, 1 (by rank)
backward passes: whole

F forward   B backward   . idle
"""


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["schedule", *arguments])
    return capsys.readouterr().out


def test_a_schedule_is_drawn_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "1f1b", "-k", "2", "-m", "3")
    assert [line.rstrip() for line in text.splitlines()] == ONE_F_ONE_B.splitlines()


def test_every_schedule_fits_80_columns_and_colors_come_where_they_are_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {name: said(capsys, name) for name in SCHEDULES}
    assert all(len(line) <= 80 and "\x1b[" not in line for text in plain.values() for line in text.splitlines())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert all("\x1b[" in said(capsys, name) for name in SCHEDULES)
    monkeypatch.setenv("NO_COLOR", "1")
    assert said(capsys, "zb_v") == plain["zb_v"]


def test_two_schedules_share_an_axis_and_the_work_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "1f1b", "zb_v").splitlines()
    assert lines[-3] == "zb_v ends 22.7% earlier than 1f1b; peak activations, in micro-batches: 1f1b 4, zb_v 4"
    assert [line.split("rank works ")[1].split()[0] for line in lines if "rank works" in line] == ["48", "48"]
    first, second = (line for line in lines if line.startswith("rank 0"))
    assert len(first.rstrip()) == 8 + 66 - 1  # the gap behind the last
    assert len(second.rstrip()) == 8 + 51
    assert "ends at the same time as the first" in said(capsys, "gpipe", "gpipe")
    assert "gpipe ends 22.2% later than zb_h1; " in said(capsys, "zb_h1", "gpipe")
    with_three = said(capsys, "1f1b", "interleaved", "--stages-per-rank", "1", "3", "-k", "2", "-m", "2")
    assert "interleaved: 2 ranks of 3 stages, 2 micro-batches" in with_three


def test_sharded_stages_are_gathered_while_their_rank_waits(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "gpipe", "-k", "2", "-m", "1", "--gather", "3", "--rank", "1")
    assert text.endswith("gpipe, rank 1: 1UNSHARD 1F0 1B0 1RESHARD\n")
    assert "the busiest rank works 3 of 9 units" in text  # both ranks gather at once


def test_weights_on_the_host_are_loaded_while_the_stage_before_computes(capsys: pytest.CaptureFixture[str]) -> None:
    how = ["-k", "1", "-m", "1", "--stages-per-rank", "3", "--rank", "0"]
    text = said(capsys, "breadth_first", *how, "--load", "2")
    loads = "0LOAD0 1LOAD0 0F0 0FREE0 2LOAD0 1F0 2F0 2B0 2FREE0 0LOAD1 1B0 1FREE0 0B0 0FREE1"
    assert text.endswith(f"breadth_first, rank 0: {loads}\n")
    assert "the busiest rank works 9 of 15 units" in text  # the first load, and the last gradients
    assert "LOAD" not in said(capsys, "breadth_first", *how)


def test_costs_stretch_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "zb_h1", "-k", "2", "-m", "2", "--forward", "2", "--backward-weight", ".5")
    assert "the busiest rank works 7 of 9.5 units" in text


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, csv = tmp_path / "zb_v.svg", tmp_path / "zb_v.csv"
    said(capsys, "zb_v", "--svg", str(svg), "--csv", str(csv))
    assert Program.from_csv(csv.read_text()) == program_of("zb_v", 4, 8)
    boxes = [r for r in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}rect") if r.get("class") == "box"]
    assert len(boxes) == 3 * 8 * 8
    assert len({box.get("fill") for box in boxes}) == 6
    said(capsys, "gpipe", "v_min", "--svg", str(svg))
    assert "v_min: 4 ranks of 2 stages, 8 micro-batches" in svg.read_text()


@pytest.mark.parametrize("file", [(), ("--svg", "wide.svg"), ("--csv", "wide.csv")])
def test_what_does_not_fit_is_said_in_figures_and_files(
    file: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(capsys, "gpipe", "-m", "64", *file)
    assert "The picture needs 209 columns, but the terminal has 80. Widen" in text
    assert "ranks: 4.5%" in text
    assert "rank 0 " not in text
    assert [path.name for path in tmp_path.iterdir()] == list(file[1:])


def test_what_cannot_be_ends_with_status_2_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ("zbv", "schedule='zbv' is unknown. Use one of 'gpipe'"),
        ("1f1b --stages-per-rank 2", "schedule='1f1b' does not support stages_per_rank=2"),
        ("dualpipe_v -m 7", "no table for micro_batches=7 with 4 ranks. Use micro_batches=8"),
        ("gpipe -k 0 -m 0", "partitions=0. Use an integer >= 1.\n       micro_batches=0"),
        ("gpipe --forward 0", "--forward: 0.0 is out of range"),
        ("gpipe --gather -1", "--gather: -1.0 is out of range"),
        ("gpipe --backward-weight nan", "--backward-weight: nan is out of range"),
        ("gpipe --stages-per-rank 1 2", "--stages-per-rank: got 2 numbers"),
        ("gpipe 1f1b --csv both.csv", "--csv: got two schedules"),
        ("gpipe --svg nowhere/at/all.svg", "nowhere/at/all.svg"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["schedule", *arguments.split()])
        assert ended.value.code == 2
        assert (error := capsys.readouterr().err).startswith("gpipe: ")
        assert words in error


def test_help_lists_the_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["schedule", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ", ".join(SCHEDULES) in text


def test_what_one_rank_does_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "1f1b", "-k", "2", "-m", "2", "--rank", "1").endswith("1f1b, rank 1: 1F0 1B0 1F1 1B1\n")
    with pytest.raises(SystemExit):
        said(capsys, "1f1b", "--rank", "4")
    assert "--rank: 4 is out of range. Choose 0 to 3." in capsys.readouterr().err


def test_a_thousand_ranks_are_told_of_without_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("-k", "1000", "-m", "60")
    lines = said(capsys, "zb_v", "1f1b", "-k", "1024", "-m", "1100").splitlines()
    assert lines[-1].endswith("; peak activations, in micro-batches: zb_v 1024, 1f1b 1024")
    lines = said(capsys, "zb_h1", "1f1b", *size, "--rank", "999").splitlines()
    assert "bubble over all ranks: 91.5% (the busiest rank works 180 of 2119 units)" in lines
    assert "peak activations in micro-batches: 1 to 60 (by rank)" in lines
    assert lines[-1].startswith("1f1b, rank 999: 999F0 999B0 999F1 999B1 ")
    with pytest.raises(SystemExit):
        said(capsys, "zb_h1", *size, "--svg", str(tmp_path / "all.svg"))
    assert "--svg, --csv: stages times micro-batches exceed 50000" in capsys.readouterr().err
