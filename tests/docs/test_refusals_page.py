"""The pages on errors and findings quote texts as they begin in the source, and all by which a model is rejected."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

SOURCE = ROOT / "src" / "gpipe"
BELOW = tuple(  # some of what they refuse is of models
    SOURCE / f"{name}.py"
    for name in (
        "stages/tree", "stages/losses", "stages/microbatch", "stages/sequence",
        "features/error_notes", "features/loss_check",
    )
)  # fmt: skip
REFERENCE = ROOT / "docs" / "reference"
PAGE = (REFERENCE / "errors.md").read_text() + (REFERENCE / "findings.md").read_text()
QUOTED = re.findall(r"^`(.*)`\n: ", PAGE, re.MULTILINE)
FIELD = re.compile(r"\{\w+(![rsa])?\}")
LONG = 40  # characters, of what is a sentence and no name


def text_of(node: ast.AST | None) -> str | None:
    """A text in the source, with `...` for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return FIELD.sub("...", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "..." for part in node.values)
    return None


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in (*sorted((SOURCE / "tracing").glob("*.py")), SOURCE / "pipeline.py"):
        yield path, ast.parse(path.read_text())


@cache
def all_texts() -> set[str]:
    read = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    return {text for module in read for node in ast.walk(module) if (text := text_of(node))}


def refusals() -> Iterator[tuple[str, str]]:
    """The texts that have a name, and those that stand where CannotSplitError is raised, each with its file."""
    for path, module in modules():
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                text = text_of(node.value)
                if text and node.targets[0].id.isupper() and len(text) > LONG:
                    yield path.name, text
        for call in ast.walk(module):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "CannotSplitError":
                text = text_of(call.args[0])
                if text:
                    yield path.name, text


def test_the_page_quotes_many() -> None:
    assert len(QUOTED) > 30
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_is_quoted_stands_in_the_source(quoted: str) -> None:
    assert any(text.startswith(quoted) for text in all_texts())


def test_every_refusal_is_on_the_page() -> None:
    assert [found for found in refusals() if not any(found[1].startswith(quoted) for quoted in QUOTED)] == []


def trees() -> Iterator[ast.Module]:
    yield from (ast.parse(path.read_text()) for path in BELOW)
    yield from (module for _, module in modules())


def type_errors() -> Iterator[ast.expr]:
    """What TypeErrors say: a text, or the name of one, perhaps filled in."""
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.Raise(ast.Call(ast.Name("TypeError"), [text, *_])):
                    yield text


def test_the_page_calls_those_type_errors_that_are() -> None:
    named = {
        node.targets[0].id: text_of(node.value) or ""
        for tree in trees()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    texts = [text_of(text) or named[ast.unparse(text).partition(".format")[0]] for text in type_errors()]
    raised = {quoted for quoted in QUOTED if any(text.startswith(quoted) for text in texts)}
    assert raised == set(re.findall(r"^`(.*)`\n: A `TypeError`", PAGE, re.MULTILINE))
