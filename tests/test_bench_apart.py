"""What measures and what tests do not know each other; `two_hosts`, which both use, knows neither."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STRANGERS = [("bench", "tests"), ("tests", "bench"), ("two_hosts", "tests"), ("two_hosts", "bench")]


def modules_named(tree: ast.AST) -> Iterator[str]:
    """What code imports, anywhere in it, and strings that name a module, say one that a process is to run."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(str(module), _, 0):
                yield module
            case ast.Constant(str(text)) if "." in text and " " not in text:
                yield text.partition(":")[0]


@pytest.mark.parametrize(("folder", "stranger"), STRANGERS, ids=lambda name: name)
def test_benchmarks_and_tests_do_not_import_each_other(folder: str, stranger: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    meetings = [
        f"{file.relative_to(ROOT)} names {module}"
        for file in files
        for module in modules_named(ast.parse(file.read_text()))
        if module.partition(".")[0] == stranger
    ]
    assert not meetings
