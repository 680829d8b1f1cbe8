"""Scripts on pages, blocks that begin with `# name.py`, run by the commands there as they stand.

Where a block of text follows on the commands, its lines are among those that they print. Scripts in examples/ that a
page includes or links to run by the commands in their docstrings.
"""

import ast
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.pages import LAUNCHERS, PAGES, ROOT, Block, blocks_of, scripts_of, starts
from tests.support import progress
from tests.support.processes.fork_server import ONE_THREAD
from tests.support.processes.launch import LOOPBACK

PROGRAMS = dict(zip(LAUNCHERS, ([sys.executable], [sys.executable, "-m", "torch.distributed.run"]), strict=True))
ALONE = {  # how torchrun is told that other tests run beside this one
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "127.0.0.1:0",
    "PET_LOCAL_ADDR": "127.0.0.1",
    **LOOPBACK,
    **ONE_THREAD,
}
SHOWN = re.compile(r"(?:literalinclude} |<)(?:\.\./)+(examples/.*\.py)")
ENGINES = ("ray_train.py", "monarch_train.py")  # run in tests/engines
INCLUDED = sorted(
    name
    for name in {name for page in PAGES for name in SHOWN.findall(page.read_text())}
    if not name.endswith(ENGINES)
)
FIGURES = re.compile(r"^.*: loss [\d.]+$", re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if scripts_of(page)], ids=lambda page: page.stem)
def test_scripts_of_a_page_run(page: Path, tmp_path: Path) -> None:
    blocks, written = blocks_of(page), set[str]()
    for block, after in zip(blocks, [*blocks[1:], Block("none", "", 0)], strict=True):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
            written.add(block.file)
        for command in block.commands:
            if any(starts(command, script) for script in written):
                check_command(command, tmp_path, after.text if after.language == "text" else None)


@pytest.mark.parametrize("example", INCLUDED)
def test_examples_run_and_print_the_same_however_they_are_started(example: str, tmp_path: Path) -> None:
    documentation = ast.get_docstring(ast.parse((ROOT / example).read_text()))
    commands = re.findall(rf"^    ((?:{'|'.join(LAUNCHERS)}) .*)$", documentation or "", re.MULTILINE)
    printed = []
    for at, command in enumerate(commands):
        folder = tmp_path / str(at)
        shutil.copytree(ROOT / "examples", folder / "examples")
        printed.append(FIGURES.findall(check_command(command, folder, None)))
    assert printed
    assert len(printed[0]) > 3
    assert all(lines == printed[0] for lines in printed)


def check_command(command: str, folder: Path, expected: str | None) -> str:
    """Runs a command in a folder: it ends well, or else prints what is expected; gives what it prints."""
    program, *arguments = shlex.split(command)
    ended = progress.run([*PROGRAMS[program], *arguments], cwd=folder, env={**os.environ, **ALONE})
    if expected is None:
        assert ended.returncode == 0, f"{command} ended with {ended.returncode}:\n{ended.stdout}"
    else:
        missing = [line for line in expected.splitlines() if line not in ended.stdout]
        assert missing == [], f"{command} did not print this:\n{ended.stdout}"
    return ended.stdout


def test_every_script_is_started() -> None:
    for page in PAGES:
        commands = [command for block in blocks_of(page) for command in block.commands]
        lost = [script for script in scripts_of(page) if not any(starts(command, script) for command in commands)]
        assert lost == [], page.name
