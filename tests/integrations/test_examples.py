"""Tests the scripts in examples/trainer: Trainer scripts that use a pipe after a change of three lines."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import progress
from tests.support.processes.fork_server import ONE_THREAD, ROOT

EXAMPLES = sorted((ROOT / "examples" / "trainer").glob("*.py"))
FIGURES = re.compile(r": (?:loss )?(\d+\.?\d*)%?")
FIRST, MAKES = re.compile(r"^(?=import|from)", re.MULTILINE), re.compile(r"^trainer = (\w*Trainer)\($", re.MULTILINE)


def converted(script: str) -> str:
    """Returns a script with the changes from docs/how-to/trainer.md."""
    made = MAKES.search(script)
    assert made is not None
    name = f"GPipe{made[1].removeprefix('GPipe')}"
    script = MAKES.sub(f"trainer = {name}(\n    partitions=2,", script)
    return FIRST.sub(f"from gpipe.integrations.transformers import {name}\n", script, count=1)


def figures(script: str, folder: Path) -> list[float]:
    folder.mkdir()
    (folder / "script.py").write_text(script)
    ended = progress.run([sys.executable, "script.py"], cwd=folder, env={**os.environ, **ONE_THREAD})
    assert ended.returncode == 0, ended.stdout
    assert list(next(path for path in folder.iterdir() if path.is_dir()).glob("*.safetensors"))
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("step", "held out"))]
    return [float(match[1]) for line in lines if (match := FIGURES.search(line))]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_three_lines_more_give_the_same_training(example: Path, tmp_path: Path) -> None:
    script = example.read_text()
    changed = converted(script)
    assert len(set(changed.splitlines()) - set(script.splitlines())) == 3
    found, expected = figures(changed, tmp_path / "piped"), figures(script, tmp_path / "plain")
    assert len(expected) >= 5
    assert expected[-2] < expected[0]
    near = 1e-4 if example.stem == "translation" else 0.0  # the last digit: T5's table of words is used twice
    assert found == pytest.approx(expected, rel=0.0, abs=near)
