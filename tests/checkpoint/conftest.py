"""Checkpoints of two runs, and a pipe that must be left as it is by whatever is wrong with them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gpipe
from tests.support.checkpointed import Odd, Victim, build, differences, remembered, snapshot, trained


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same shapes, with checkpoints of steps 1 and 2 each."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("run", 1), ("other", 2)):
        for step in (1, 2):
            pipe, optimizer = trained([*build(seed), Odd()], 2, steps=step)
            gpipe.save(folder / name, pipe, optimizer, extra={"rng": torch.arange(8.0) + seed})
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "run", tmp_path / "run"))


@pytest.fixture
def victim() -> Iterator[Victim]:
    """A pipe and its optimizer, of which nothing must change."""
    pipe, optimizer = trained([*build(3), Odd()], 2, steps=1)
    before = snapshot(pipe, optimizer)
    yield pipe, optimizer
    assert differences(remembered(pipe, optimizer), before) == []
    assert (pipe.step_number, pipe.seed) == (1, 4)
