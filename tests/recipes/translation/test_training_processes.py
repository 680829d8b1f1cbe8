"""`gpipe train translation` under torchrun: over processes as over threads, and in replicas."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gpipe.recipes.options.training import TranslationOptions
from tests.support.processes.torchrun import torchrun
from tests.support.small_images import flags, same
from tests.support.toy_language import options, train


def launched(given: TranslationOptions, folder: Path) -> str:
    """Trains by two processes; gives what they said."""
    with torchrun(2, "gpipe", "train", "translation", *flags(given), folder=folder) as run:
        log = run.wait()
    assert run.popen.returncode == 0, log
    return log


def losses(out: Path) -> list[list[float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [[line["loss"], line["nll"]] for line in lines]


@pytest.mark.parametrize("partitions", [2, 1])
def test_two_processes_train_as_one_does(partitions: int, tmp_path: Path) -> None:
    """As two partitions to the same bits; as two replicas, one without a sentence at times, but for rounding."""
    alone = options(tmp_path, steps=12, micro_batches=2, dropout=0.1 if partitions == 2 else 0.0)
    train(alone)
    together = replace(alone, out=tmp_path / "together", partitions=partitions)
    log = launched(together, tmp_path)
    weights = [load_file(out / "model.safetensors") for out in (alone.out, together.out)]
    if partitions == 2:
        assert losses(together.out) == losses(alone.out)
        assert same(*weights)
    else:
        assert "2 replicas" in log
        for found, expected in zip(losses(together.out), losses(alone.out), strict=True):
            assert found == pytest.approx(expected, rel=1e-3)
