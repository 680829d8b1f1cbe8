"""`gpipe record` under torchrun: what crosses in some steps of a run, which stays as it was."""

from pathlib import Path

import pytest

from gpipe.cli.main import main
from gpipe.profiling.messages import read_messages
from tests.support.processes.torchrun import torchrun

STEPS, MICRO_BATCHES = 2, 4
SMALL = ("--filters", "16", "--image-size", "32", "--batch-size", "8", "--micro-batches", str(MICRO_BATCHES))


def test_what_crosses_is_written_and_the_run_stays_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    main(["train", "digits", "--steps", "1", "--partitions", "1", "--out", str(run), *SMALL])
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with torchrun(2, "gpipe", "record", str(run), "--steps", str(STEPS), folder=tmp_path) as launched:
        log = launched.wait()
    assert launched.popen.returncode == 0, log
    messages = read_messages(run / "messages.jsonl")
    sends, receives = ([one for one in messages if one.kind == kind] for kind in ("send", "receive"))
    assert len(sends) == len(receives) == STEPS * 2 * MICRO_BATCHES  # activations one way, gradients the other
    assert {one.step for one in messages} == set(range(STEPS))
    assert sum(one.bytes for one in sends) == sum(one.bytes for one in receives) > 0
    assert f"{len(messages)} messages of {STEPS} steps" in log
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file in before} == before


def test_one_process_is_told_to_use_torchrun(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["record", str(tmp_path)])
    assert ended.value.code == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
