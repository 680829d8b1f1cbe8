"""What the pages name is there: pages and headings that they link to, files, commands of make, public names."""

import re
import tomllib
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest

import gpipe
from tests.docs.pages import PAGES, ROOT, blocks_of

ALL = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
HISTORY = {"log.md", "CHANGELOG.md"}  # they name what was there once
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:[\w-]+/)+[\w.-]*|[\w/-]+\.(?:py|md|svg|toml))`")
MADE = ("docs/_build", "run/", "out/", "config.toml")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def slug(heading: str) -> str:
    """The name by which a heading is linked to, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for target in LINK.findall(page.read_text()):
        file, _, heading = target.partition("#")
        if file.startswith("http"):
            continue
        there = (page.parent / file) if file else page
        slugs = {slug(title) for title in HEADING.findall(there.read_text())} if heading else {heading}
        if not there.exists() or heading not in slugs:
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("page", [page for page in ALL if page.name not in HISTORY], ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    places = (ROOT, ROOT / "src" / "gpipe", page.parent)
    named = {name for name in NAMED.findall(page.read_text()) if not name.startswith(MADE)}
    assert sorted(name for name in named if not any((place / name).exists() for place in places)) == []


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_targets_of_make_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [command for block in blocks_of(page) for command in block.commands]
    asked = re.findall(r"^make ([\w-]+)", "\n".join(commands), re.MULTILINE)
    named = {*asked, *re.findall(r"`make ([\w-]+)`", page.read_text())}
    assert [name for name in named if not any(fnmatch(name, target.replace("%", "*")) for target in targets)] == []


def test_the_reference_has_every_public_name() -> None:
    reference = (ROOT / "docs" / "api.md").read_text()
    names = [f"gpipe.{name}" for name in gpipe.__all__]
    names += [f"gpipe.models.{name}" for name in gpipe.models.__all__]  # type: ignore[attr-defined]
    names += [f"gpipe.profiling.{name}" for name in __import__("gpipe.profiling").profiling.__all__]
    assert [name for name in names if not re.search(rf":: {re.escape(name)}$", reference, re.MULTILINE)] == []


def test_contributing_lists_the_packages_of_the_house() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    house = [set(layer.split(" | ")) for layer in contracts[0]["layers"]]
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    listed = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    assert set().union(*listed) == set().union(*house) - {"models"}
    assert len(rows) == 13


def test_everything_in_the_reference_has_an_example() -> None:
    reference = (ROOT / "docs" / "api.md").read_text()
    names = re.findall(r"^\.\. auto\w+:: (\S+)$", reference, re.MULTILINE)
    assert len(names) > 50
    assert [name for name in names if ">>>" not in (find(name).__doc__ or "")] == []


def find(path: str) -> object:
    """What a dotted path names: where a module and a function of it have one name, the function."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError:
        return getattr(find(module), name)
