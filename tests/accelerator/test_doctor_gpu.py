"""Runs `make gpu` from end to end on the simulated accelerator."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpipe.cli.gpu.page import PARTS
from tests.accelerator import lacking
from tests.accelerator.installed import environment
from tests.support import progress

REHEARSED = {
    "bits": "passed",
    "shared": "passed",
    "weights": "passed",
    "several": "passed",
    "nccl": "passed",  # with gloo in its place, which it says
    "memory": "passed",
    "speed": "measured",
    "beside": "not run",
    "host": "measured",
    "graphs": "not run",
    "sanitizer": "not run",
    "tests": "passed",
}
NOT_REHEARSED = [
    "NCCL, which sim has not",
    "torch's own schedules, which take two CUDA devices and NCCL",
    "CUDA_DEVICE_MAX_CONNECTIONS, of which sim knows nothing",
    "CUDA graphs, which sim has not",
    "torch.cuda._sanitizer and compute-sanitizer, which are CUDA's",
    "1 skipped: needs CUDA, whose kernels can be told to sleep",
]


pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


def rehearse(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Returns the status of the command, its output, and the checks of its page."""
    command = [sys.executable, "-m", "gpipe", "doctor", "--gpu", "--quick", "--out", str(folder / "results")]
    done = progress.run([*command, *arguments], env=environment(folder / "installed"))
    return done.returncode, done.stdout, json.loads((folder / "results" / "page.json").read_text())["parts"]


def test_all_parts_are_rehearsed_and_what_is_not_is_listed(tmp_path: Path) -> None:
    status, said, parts = rehearse(tmp_path)
    assert {name: part["verdict"] for name, part in parts.items()} == REHEARSED, said
    assert status == 0, said
    found = [finding for part in parts.values() for finding in part["findings"]]
    missing = {finding["text"] for finding in found if finding["verdict"] == "not run"}
    assert set(NOT_REHEARSED) <= missing
    assert parts["bits"]["findings"][0]["numbers"]["pipes"] == 9
    assert len(said.splitlines()) < 60
    for name in PARTS:
        assert json.loads((tmp_path / "results" / f"{name}.json").read_text()) == parts[name]
        assert (tmp_path / "results" / f"{name}.log").exists()


@pytest.mark.parametrize("name", ["several", "weights", "memory", "graphs"])
def test_a_part_is_rehearsed(name: str, tmp_path: Path) -> None:
    status, said, parts = rehearse(tmp_path, "--part", name)
    assert status == 0, said
    assert {each: part["verdict"] for each, part in parts.items()} == dict.fromkeys(PARTS, "not run") | {
        name: REHEARSED[name]
    }
