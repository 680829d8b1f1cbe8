"""Errors and findings end with a slug, and each slug has one explanation, which quotes how the message begins."""

import ast
import re
from functools import cache

import pytest

from gpipe.cli.main import main
from gpipe.explanations import FINDINGS, Explanation, as_text, explanations
from tests.docs.pages import ROOT

SOURCE = ROOT / "src" / "gpipe"
SLUG = re.compile(r"\[([a-z0-9]+(?:-[a-z0-9]+)+)\]\"")  # at the end of a text
ENTRIES = explanations()
FIELD = re.compile(r"\{\w+(![rsa])?\}")
REFERENCE = ROOT / "docs" / "reference"


def text_of(node: ast.AST | None) -> str | None:
    """A text in the source, with `...` for each placeholder."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return FIELD.sub("...", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "..." for part in node.values)
    return None


@cache
def all_texts() -> set[str]:
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    return {text for tree in trees for node in ast.walk(tree) if (text := text_of(node))}


def raised_slugs() -> dict[str, str]:
    """Each slug that ends a text in the source, with the file."""
    return {slug: path.name for path in SOURCE.rglob("*.py") for slug in SLUG.findall(path.read_text())}


def test_slugs_of_messages_and_explanations_are_the_same() -> None:
    assert {slug: file for slug, file in raised_slugs().items() if slug not in ENTRIES} == {}
    assert sorted(ENTRIES.keys() - raised_slugs().keys()) == []


def test_every_rejection_of_a_model_ends_with_a_slug() -> None:
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    rejections = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "CannotSplitError"]
    texts = list(filter(None, (text_of(call.args[0]) for call in rejections)))
    assert len(texts) > 5
    assert [text for text in texts if not SLUG.search(f'{text}"')] == []


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_the_messages_of_an_explanation_are_in_the_source(entry: Explanation) -> None:
    assert entry.messages
    for message in entry.messages:
        assert any(text.startswith(message) for text in all_texts()), message


def test_each_section_is_on_one_page() -> None:
    for page in ("errors", "findings"):
        marked = re.findall(r"<!-- explanations: (.*) -->", (REFERENCE / f"{page}.md").read_text())
        assert len(set(marked)) == len(marked)
        assert set(marked) == {entry.section for entry in ENTRIES.values() if entry.page == page}
        assert (page == "findings") == (set(marked) <= set(FINDINGS))


def test_explain_prints_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "[branch-on-value]"])
    assert capsys.readouterr().out == as_text(ENTRIES["branch-on-value"])


def test_explain_lists_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain"])
    assert capsys.readouterr().out.split() == list(ENTRIES)


@pytest.mark.parametrize(
    ("given", "fix"),
    [("branch-on-valu", "Did you mean branch-on-value?"), ("[xyz]", "`gpipe explain` lists all names.")],
)
def test_explain_suggests_similar_names(given: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", given])
    name = given.strip("[]")
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        f"gpipe: {name!r} is not the name of a message. {fix}\n",
    )
