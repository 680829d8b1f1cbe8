"""The page on schedules says what the tables do, and what `gpipe schedule` prints."""

import re
import shlex
from itertools import pairwise

import pytest

from gpipe.cli.main import main
from gpipe.schedule.action import Kind
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.simulate import figures
from tests.docs.pages import PAGES, ROOT, blocks_of

PAGE = (ROOT / "docs" / "reference" / "schedules.md").read_text()
DRAWINGS = (ROOT / "docs" / "reference" / "schedule-drawings.md").read_text()
LINES = {
    name: [cell.strip().strip("`") for cell in cells.split("|")]
    for name, cells in re.findall(r'^\| `"(\w+)"`(?: \(default\))? \|(.*)\|$', PAGE, re.MULTILINE)
}


def test_every_schedule_has_a_line_and_a_picture() -> None:
    assert list(LINES) == list(SCHEDULES)
    assert re.findall(r"^```\{schedule\} (\w+)$", DRAWINGS, re.MULTILINE) == list(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_formulas_are_those_of_the_tables(name: str, ranks: int) -> None:
    stages, excess, peak, backwards, _ = LINES[name]
    assert int(stages[0]) == (SCHEDULES[name].stages_per_rank)
    for micro_batches in (2 * ranks, 4 * ranks):
        program = program_of(name, ranks, micro_batches)
        each, found = program.stages // ranks, figures(program)
        letters = {"K": ranks, "M": micro_batches, "v": each}
        assert found.work == 3 * each * micro_batches
        assert found.seconds - found.work == eval(excess, letters.copy())
        assert max(found.peaks) == eval(peak, letters.copy())
        kinds = {Kind.BACKWARD: "whole", Kind.BACKWARD_WEIGHT: "split"}
        done = [word for kind, word in kinds.items() if kind in {action.kind for action in program.actions}]
        assert backwards == (done[0] if len(done) == 1 else "some split")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_that_of_the_picture(name: str) -> None:
    assert LINES[name][-1] == f"{figures(program_of(name, 4, 8)).bubble:.1%}"


def test_schedules_in_the_terminal_look_like_this(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asked = 0
    for page in PAGES:
        blocks = blocks_of(page)
        for block, after in pairwise(blocks):
            for command in block.commands:
                if command.startswith("gpipe schedule"):
                    main(shlex.split(command)[1:])
                    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == after.text.splitlines()
                    asked += 1
    assert asked
