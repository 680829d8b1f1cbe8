"""The pictures in the docstrings of schedules are what is drawn today."""

import re
from collections.abc import Callable

import pytest

from gpipe.profiling import lanes_text
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import SCHEDULES, fill_drain, forward_only
from gpipe.schedule.schedules.by_name import program_of

PICTURE = re.compile(r"^( *)```text\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
OF_ONE_STAGE = ("1f1b", "zb_h1", "zb_h2")


def picture(function: Callable[..., object]) -> str:
    (found,) = PICTURE.findall(function.__doc__ or "")
    indent, text = found
    return "\n".join(line.removeprefix(indent) for line in text.splitlines())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_of_a_page_is_what_it_does(name: str) -> None:
    ranks = 3 if name in OF_ONE_STAGE else 2
    program = program_of(name, ranks, 5 if name == "zb_h2" else 4, 2 if name == "gpipe" else None)
    assert picture(SCHEDULES[name].table) == lanes_text(program)


def test_the_pictures_of_one_stage_a_rank_are_what_is_done() -> None:
    assert picture(fill_drain) == lanes_text(Program.of(fill_drain(3, 4), 4))
    assert picture(forward_only) == lanes_text(Program.of(forward_only(3, 4), 4))
