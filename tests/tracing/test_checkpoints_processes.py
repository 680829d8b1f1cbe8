"""What processes save of a model, others load: another number of them, by another schedule, and transformers."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.jobs import model_checkpoints as jobs
from tests.support.jobs.models import piped
from tests.support.open_models import UNET, model_of
from tests.support.processes.digests import Digests, digest, digests
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers


def check(ranks: list[Digests], expected: Digests) -> None:
    """All that any rank has is right, and together they have all."""
    assert not [
        (rank, what) for rank, of in enumerate(ranks) for what, one in of.items() if expected.get(what) != one
    ]
    assert expected.keys() == {what for of in ranks for what in of}


@pytest.mark.parametrize("name", ["llama", "t5", UNET])
def test_two_save_and_others_go_on(name: str, tmp_path: Path, pool: WorkerPool) -> None:
    with piped(model_of(name), name, 1, driver="lockstep") as pipe:
        optimizer = jobs.optimizer_of(pipe)
        before = digests(jobs.clipped(pipe, optimizer, name, 2))
        after = digests(jobs.clipped(pipe, optimizer, name, 2))
    folder = str(tmp_path)
    saved = answers(pool.run(jobs.save, name, folder, {"schedule": "1f1b"}, world=2))
    check([of for of, _ in saved], before)
    check([of for _, of in saved], after)
    check([jobs.resumed(name, 1, folder, driver="lockstep")], after)
    check(answers(pool.run(jobs.resume, name, folder, {}, world=3)), after)
    check(answers(pool.run(jobs.resume, name, folder, {"schedule": "zb_v"}, world=2)), after)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_transformers_reads_what_processes_save(name: str, tmp_path: Path, pool: WorkerPool) -> None:
    ranks = answers(pool.run(jobs.save_weights, name, str(tmp_path), world=2))
    model: Any = type(model_of(name))
    check(ranks, digests(model.from_pretrained(tmp_path).state_dict()))


def test_what_several_layers_use_is_saved_once(tmp_path: Path, pool: WorkerPool) -> None:
    ranks = answers(pool.run(jobs.save_weights, UNET, str(tmp_path), world=3))
    saved = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert sorted(saved) == sorted({name for of in ranks for name in of})
    check(answers(pool.run(jobs.load_weights, UNET, str(tmp_path), world=2)), ranks[0] | ranks[1] | ranks[2])


@pytest.mark.parametrize(("name", "size"), [("llama", "50KB"), ("t5", "50KB"), ("gpt2", "1GB")])
def test_processes_read_what_transformers_saves(name: str, size: str, tmp_path: Path, pool: WorkerPool) -> None:
    model: Any = jobs.other(name)
    model.save_pretrained(tmp_path, max_shard_size=size)
    expected = {key: digest(value) for key, value in model.state_dict().items()}
    check(answers(pool.run(jobs.load_weights, name, str(tmp_path), world=3)), expected)
