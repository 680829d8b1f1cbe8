"""The page of `gpipe doctor --gpu`: parts that fail leave the others alone, and what they have found until then."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from gpipe.cli.gpu import bits, page
from gpipe.cli.gpu.page import examine
from gpipe.cli.main import main
from tests.support import faulty_parts
from tests.support.progress import all_stats, wait_until

FOUND = {
    "installed": {"gpipe": "0.1.0", "torch": "2.13.0, built for CUDA 13.0"},
    "devices": {"cuda:0": "A100, 40.0 GiB", "cuda:1": "A100, 40.0 GiB", "between processes": "gloo, nccl"},
}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Those of `faulty_parts` that a test names."""
    monkeypatch.setattr(page, "PARTS", {name: f"{faulty_parts.__name__}:{name}" for name in request.param})


def told(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """What each part left, as the page has it."""
    parts = json.loads((folder / "page.json").read_text())["parts"]
    assert all(json.loads((folder / f"{name}.json").read_text()) == part for name, part in parts.items())
    return {
        name: [(part["verdict"], ""), *((finding["verdict"], finding["text"]) for finding in part["findings"])]
        for name, part in parts.items()
    }


@pytest.mark.parametrize(
    "parts", [("falls_short", "raises", "crashes", "exits", "finds_nothing", "works")], indirect=True
)
@pytest.mark.usefixtures("parts")
def test_a_part_that_fails_is_told_and_leaves_the_others_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not examine(tmp_path, (), FOUND, 3)
    said = capsys.readouterr().out
    assert told(tmp_path) == {
        "falls_short": [("failed", ""), ("passed", "this"), ("failed", "and not that")],
        "raises": [
            ("error", ""),
            ("passed", "the first"),
            ("error", "status 1, RuntimeError: CUDA error: an illegal memory access (see raises.log)"),
        ],
        "crashes": [
            ("error", ""), ("passed", "what was before"), ("error", "killed by SIGSEGV (see crashes.log)")
        ],
        "exits": [("error", ""), ("passed", "begun"), ("error", "status 7, no output (see exits.log)")],
        "finds_nothing": [("error", ""), ("error", "reported nothing (see finds_nothing.log)")],
        "works": [("passed", ""), ("passed", "one of 3"), ("measured", "8 ms")],
    }  # fmt: skip
    assert "in crashes\n" in (tmp_path / "crashes.log").read_text()  # where it was
    assert "Failed: falls_short, raises, crashes, exits, finds_nothing." in said
    assert "gpipe 0.1.0 on 2 x A100, 40.0 GiB\n" in said
    assert max(map(len, said.split("\nPlease")[0].splitlines())) <= page.WIDTH


@pytest.mark.parametrize("parts", [("stands_still", "works")], indirect=True)
@pytest.mark.usefixtures("parts")
def test_a_part_that_stands_still_is_stopped_with_all_it_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "stands_still.log"

    class AtItsLimit(subprocess.Popen[bytes]):
        """The time of a part is up once it stands still; others have all that they take."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == page.LIMIT and ":stands_still" in str(self.args):
                wait_until(lambda: "started" in log.read_text())
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(None if timeout == page.LIMIT else timeout)

    monkeypatch.setattr(subprocess, "Popen", AtItsLimit)
    assert not examine(tmp_path, (), FOUND, 1)
    assert told(tmp_path) == {
        "stands_still": [
            ("error", ""),
            ("passed", "so far"),
            ("error", "stopped after 540 s (see stands_still.log)"),
        ],
        "works": [("passed", ""), ("passed", "one of 1"), ("measured", "8 ms")],
    }
    assert "faulty_parts.py" in log.read_text()  # where it stood
    started = int(log.read_text().split()[1])
    wait_until(lambda: all_stats().get(started, ["Z"])[0] == "Z")
    assert "Failed: stands_still." in capsys.readouterr().out


@pytest.mark.parametrize("parts", [("works", "falls_short")], indirect=True)
@pytest.mark.usefixtures("parts")
def test_parts_are_run_one_by_one_onto_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(tmp_path, ("works",), FOUND, 1)
    said = capsys.readouterr().out
    assert "falls_short not run        0 s  Run it with --part falls_short." in said
    assert "No check failed.\nNot run: falls_short.\n" in said
    assert not examine(tmp_path, ("falls_short",), FOUND, 1)
    assert [lines[0] for lines in told(tmp_path).values()] == [("passed", ""), ("failed", "")]
    with pytest.raises(ValueError, match=r"--part: speeed .* Choose from works, falls_short"):
        examine(tmp_path, ("speeed",), FOUND, 1)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_without_an_accelerator_it_says_so_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--gpu", "--out", str(tmp_path / "results")])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.startswith("gpipe: --gpu: torch 2.")
    assert "finds no accelerator" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--part", "bits"], "--part"),
        (["--quick"], "--quick"),
        (["--quick", "--part", "bits"], "--part, --quick"),
    ],
)
def test_parts_are_of_the_gpu_alone(given: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *given])
    assert (end.value.code, capsys.readouterr().err) == (2, f"gpipe: {named}: no effect without --gpu. Add --gpu.\n")


def test_a_wheel_says_which_parts_a_checkout_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PARTS", {"graphs": page.PARTS["graphs"]})
    monkeypatch.setattr(page, "CHECKOUT", tmp_path)
    assert examine(tmp_path / "results", (), FOUND, 1)
    assert told(tmp_path / "results")["graphs"][1] == (
        "not run",
        "Requires a checkout of gpipe. Run `make gpu` there.",
    )


def test_one_bit_and_an_error_fall_short() -> None:
    cpu = torch.device("cpu")
    expected = bits.train_reference(bits.images, cpu)
    expected["3.weight.grad"][0, 0, 0, 0] = expected["3.weight.grad"][0, 0, 0, 0].nextafter(torch.tensor(9.0))
    ways = [{"schedule": "1f1b"}, {"schedule": "zb_v", "remat": "sometimes"}]
    try:
        *wrong, last = bits.compare("images", bits.images, lambda: expected, [cpu, cpu], ways)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [finding.text.splitlines()[0] for finding in wrong] == [
        "images: 1f1b: 1 of 28 tensors differ: 3.weight.grad ...",
        "images: zb_v sometimes: ValueError: GPipe cannot be built:",
    ]
    assert (last.verdict, last.text) == ("failed", "images: 0 of 2 pipes")
