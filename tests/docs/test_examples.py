"""All code of README and docs runs: the blocks of a page from top to bottom, in one namespace and one folder."""

import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import PAGES, Block, blocks_of
from tests.support.trackers import own_trackio

SOMETIMES = ("tensorboard", "trackio")  # extras of dev that an older environment may lack


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """Pages may set how many threads an operation has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own_trackio(tmp_path, monkeypatch)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    missing: list[str] = []
    for block in blocks_of(page):
        if block.language == "pycon":
            run_doctest(block, page, namespace)
        elif block.language == "python" and block.file is None:  # scripts are run by their commands
            try:
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
            except ModuleNotFoundError as error:
                if error.name not in SOMETIMES:
                    raise
                missing.append(error.name)
    if missing:
        pytest.skip(f"all but what needs {' and '.join(missing)}, which is not installed")


def run_doctest(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, namespace, page.name, str(page), block.line - 1)
    test.globs = namespace  # not a copy
    doctest.DebugRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)


def test_blocks_are_in_languages_that_are_known_here() -> None:
    """Others would be taken for code that runs, and would not. `py` marks lines of Python that do not run alone."""
    odd = [(page.name, block.line, block.language) for page in PAGES for block in blocks_of(page)]
    assert [found for found in odd if found[2] not in ("python", "py", "pycon", "sh", "text", "yaml")] == []
