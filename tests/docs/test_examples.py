"""All code of README and docs runs: the blocks of a page from top to bottom, in one namespace and one folder.

A block that begins with `# name.py` is a script; the commands that start it are run as they stand, and where a block
of text follows, that is what they print.
"""

import doctest
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import PAGES, Block, blocks_of

LAUNCHERS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
ALONE = {  # how torchrun is told that other tests run beside this one
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "127.0.0.1:0",
    "PET_LOCAL_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
SECONDS = 300


def run_doctest(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, namespace, page.name, str(page), block.line - 1)
    runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS)
    test.globs = namespace  # not a copy
    runner.run(test, clear_globs=False)


def run_command(command: str) -> str:
    """Runs a command in the folder of the page; gives what it printed."""
    program, *arguments = shlex.split(command)
    ended = subprocess.run(
        [*LAUNCHERS[program], *arguments],
        env={**os.environ, **ALONE},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return f"{ended.stdout}\nstatus {ended.returncode}\n"


def starts(command: str, scripts: set[str]) -> bool:
    """Whether a command starts a script of the page, on this host alone."""
    words = shlex.split(command)
    return words[0] in LAUNCHERS and not scripts.isdisjoint(words) and "HOST" not in command


def run_shell(block: Block, expected: str | None, scripts: set[str]) -> None:
    for command in block.commands:
        if not starts(command, scripts):
            continue
        printed = run_command(command)
        if expected is None:
            assert printed.endswith("\nstatus 0\n"), f"{command}:\n{printed}"
        else:
            missing = [line for line in expected.splitlines() if line not in printed]
            assert not missing, f"{command}:\n{printed}"


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """Pages may set how many threads an operation has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    scripts: set[str] = set()
    blocks = blocks_of(page)
    for at, block in enumerate(blocks):
        if block.file is not None:
            Path(block.file).write_text(block.text)
            scripts.add(block.file)
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
        elif block.language == "pycon":
            run_doctest(block, page, namespace)
        elif block.language == "sh":
            after = next(iter(blocks[at + 1 :]), block)
            run_shell(block, after.text if after.language == "text" else None, scripts)


def test_every_script_of_a_page_is_started() -> None:
    for page in PAGES:
        blocks = blocks_of(page)
        scripts = {block.file for block in blocks if block.file is not None}
        commands = [command for block in blocks for command in block.commands]
        started = {script for script in scripts for command in commands if starts(command, {script})}
        assert started == scripts, page.name


def test_blocks_are_in_languages_that_are_known_here() -> None:
    """Others would be taken for code that runs, and would not."""
    odd = [(page.name, block.line, block.language) for page in PAGES for block in blocks_of(page)]
    assert [found for found in odd if found[2] not in ("python", "pycon", "sh", "text")] == []
