"""What the pages name is there: pages and headings that they link to, files, commands of make, public names."""

import re
import runpy
import tomllib
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

import gpipe
from tests.docs.pages import PAGES, ROOT, blocks_of

HISTORY = ROOT / "dev" / "log.md"  # it names files that no longer exist
CURRENT = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "changes" / "README.md"]
ALL = [*CURRENT, HISTORY]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:[\w-]+/)+[\w.-]*|[\w/-]+\.(?:py|md|svg|toml))`")
MADE = ("docs/_build", "run/", "out/", "config.toml")
NUMBERS = ("share/", "bubble/", "busy/", "stage_seconds/", "memory_bytes/", "predicted_memory_bytes/")
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


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    places = (ROOT, ROOT / "src" / "gpipe", ROOT / "docs", page.parent)
    named = {name for name in NAMED.findall(page.read_text()) if not name.startswith((*MADE, *NUMBERS))}
    assert sorted(name for name in named if not any((place / name).exists() for place in places)) == []


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_targets_of_make_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [command for block in blocks_of(page) for command in block.commands]
    asked = re.findall(r"^make ([\w-]+)", "\n".join(commands), re.MULTILINE)
    named = {*asked, *re.findall(r"`make ([\w-]+)`", page.read_text())}
    assert [name for name in named if not any(fnmatch(name, target.replace("%", "*")) for target in targets)] == []


def test_news_fragments_have_a_type() -> None:
    """Otherwise towncrier leaves them out of the changelog."""
    types = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["fragment"]
    fragments = [path for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    assert [
        path.name for path in fragments if not re.fullmatch(rf"(\d+|\+[\w-]+)\.({'|'.join(types)})\.md", path.name)
    ] == []


def test_the_reference_has_every_public_name() -> None:
    reference = read_reference()
    names = [f"gpipe.{name}" for name in gpipe.__all__]
    names += [f"gpipe.models.{name}" for name in gpipe.models.__all__]
    names += [f"gpipe.profiling.{name}" for name in __import__("gpipe.profiling").profiling.__all__]
    assert [name for name in names if not re.search(rf":: {re.escape(name)}$", reference, re.MULTILINE)] == []


def test_the_picture_of_the_packages_is_what_is_drawn_from_the_contracts() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "_ext" / "packages.py"))["draw"]()
    assert (ROOT / "docs" / "packages.svg").read_text() == drawn, "run `python docs/_ext/packages.py`"
    ElementTree.fromstring(drawn)


@pytest.mark.parametrize(
    "page",
    [*sorted((ROOT / "docs" / "contributing").glob("*.md")), ROOT / "CONTRIBUTING.md"],
    ids=lambda page: page.name,
)
def test_names_that_stand_with_their_file_are_defined_in_it(page: Path) -> None:
    """Such as `Context.cancel` (`runtime/context.py`)."""
    lost = []
    for name, file in re.findall(r"`([\w.]+)`\s\(`([\w/]+\.py)`\)", page.read_text()):
        source = (ROOT / "src" / "gpipe" / file).read_text()
        *_, last = name.split(".")
        if not re.search(rf"^\s*(?:(?:def|class) {last}\b|{last}(?:: .*)? = )", source, re.MULTILINE):
            lost.append((name, file))
    assert lost == []


def test_everything_in_the_reference_has_an_example() -> None:
    reference = read_reference()
    names = re.findall(r"^\.\. auto\w+:: (\S+)$", reference, re.MULTILINE)
    assert len(names) > 50
    assert [name for name in names if ">>>" not in (find(name).__doc__ or "")] == []


def read_reference() -> str:
    """Returns all pages of the API reference."""
    return "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference" / "api").glob("*.md")))


def find(path: str) -> object:
    """What a dotted path names: where a module and a function of it have one name, the function."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError:
        return getattr(find(module), name)
