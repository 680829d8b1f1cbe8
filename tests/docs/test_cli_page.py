"""The page of the command line has every command."""

import re

import pytest

from gpipe.cli.main import main
from gpipe.recipes.options.training import OPTIONS
from tests.docs.pages import DOCS

PAGE = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")


def test_every_command_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    usage = re.search(r"\{([\w,]+)\}", capsys.readouterr().out)
    assert usage is not None
    listed = {name.split()[0] for name in re.findall(r"^```\{command\} (.*)$", PAGE, re.MULTILINE)}
    assert listed == set(usage[1].split(","))


def test_every_recipe_is_on_the_page() -> None:
    assert [name for name in OPTIONS if f"gpipe train {name}" not in PAGE] == []
