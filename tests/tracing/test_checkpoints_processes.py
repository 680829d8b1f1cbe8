"""Tests that checkpoints of several processes load with other numbers of processes, and in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gpipe
from tests.support.jobs.models import piped
from tests.support.open_models import UNET, batch_of, model_of
from tests.support.outcomes import Outcome, state
from tests.support.processes.digests import Digests, digest, digests
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

NORM = 0.5


def optimizer_of(pipe: gpipe.GPipe) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=0.01)


def clipped(pipe: gpipe.GPipe, optimizer: torch.optim.Optimizer, name: str, steps: int) -> Outcome:
    found: Outcome = {}
    for _ in range(steps):
        at = pipe.step_number
        found[f"{at} loss"] = pipe.step(batch_of(name, at))
        found[f"{at} norm"] = pipe.clip_grad_norm_(NORM)
        optimizer.step()
        optimizer.zero_grad()
    return found | state(pipe, "end")


def save(rank: int, world: int, name: str, folder: str, how: dict[str, Any]) -> tuple[Digests, Digests]:
    with piped(model_of(name), name, world, driver="process", **how) as pipe:
        optimizer = optimizer_of(pipe)
        before = digests(clipped(pipe, optimizer, name, 2))
        gpipe.save(folder, pipe, optimizer)
        return before, digests(clipped(pipe, optimizer, name, 2))


def other(name: str) -> torch.nn.Module:
    """Returns a model with the same shapes and different values."""
    model = model_of(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def resumed(name: str, world: int, folder: str, **how: Any) -> Digests:
    with piped(other(name), name, world, **how) as pipe:
        optimizer = optimizer_of(pipe)
        gpipe.load(folder, pipe, optimizer)
        return digests(clipped(pipe, optimizer, name, 2))


def resume(rank: int, world: int, name: str, folder: str, how: dict[str, Any]) -> Digests:
    return resumed(name, world, folder, driver="process", **how)


def save_weights(rank: int, world: int, name: str, folder: str) -> Digests:
    """Runs a step and saves the weights. Returns those of this rank."""
    model: Any = model_of(name)
    with piped(model, name, world, driver="process") as pipe:
        optimizer = optimizer_of(pipe)
        clipped(pipe, optimizer, name, 1)
        gpipe.save_weights(folder, pipe)
        if rank == 0 and hasattr(model, "config"):
            model.config.save_pretrained(folder)
        return digests(pipe.state_dict())


def load_weights(rank: int, world: int, name: str, folder: str) -> Digests:
    """Loads weights into a model built on the meta device."""
    with piped(model_of(name, "meta"), name, world, driver="process") as pipe:
        gpipe.load_weights(folder, pipe)
        found = digests(pipe.state_dict())
        assert pipe.step(batch_of(name)).isfinite()
        return found


def check(ranks: list[Digests], expected: Digests) -> None:
    """Checks that each rank has correct weights, and that together they have all."""
    assert not [
        (rank, what) for rank, of in enumerate(ranks) for what, one in of.items() if expected.get(what) != one
    ]
    assert expected.keys() == {what for of in ranks for what in of}


@pytest.mark.parametrize("name", ["llama", "t5", UNET])
def test_two_save_and_others_go_on(name: str, tmp_path: Path, pool: WorkerPool) -> None:
    with piped(model_of(name), name, 1, driver="lockstep") as pipe:
        optimizer = optimizer_of(pipe)
        before = digests(clipped(pipe, optimizer, name, 2))
        after = digests(clipped(pipe, optimizer, name, 2))
    folder = str(tmp_path)
    saved = answers(pool.run(save, name, folder, {"schedule": "1f1b"}, world=2))
    check([of for of, _ in saved], before)
    check([of for _, of in saved], after)
    check([resumed(name, 1, folder, driver="lockstep")], after)
    check(answers(pool.run(resume, name, folder, {}, world=3)), after)
    check(answers(pool.run(resume, name, folder, {"schedule": "zb_v"}, world=2)), after)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_transformers_reads_what_processes_save(name: str, tmp_path: Path, pool: WorkerPool) -> None:
    ranks = answers(pool.run(save_weights, name, str(tmp_path), world=2))
    model: Any = type(model_of(name))
    check(ranks, digests(model.from_pretrained(tmp_path).state_dict()))


def test_what_several_layers_use_is_saved_once(tmp_path: Path, pool: WorkerPool) -> None:
    ranks = answers(pool.run(save_weights, UNET, str(tmp_path), world=3))
    saved = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert sorted(saved) == sorted({name for of in ranks for name in of})
    check(answers(pool.run(load_weights, UNET, str(tmp_path), world=2)), ranks[0] | ranks[1] | ranks[2])


@pytest.mark.parametrize(("name", "size"), [("llama", "50KB"), ("t5", "50KB"), ("gpt2", "1GB")])
def test_processes_read_what_transformers_saves(name: str, size: str, tmp_path: Path, pool: WorkerPool) -> None:
    model: Any = other(name)
    model.save_pretrained(tmp_path, max_shard_size=size)
    expected = {key: digest(value) for key, value in model.state_dict().items()}
    check(answers(pool.run(load_weights, name, str(tmp_path), world=3)), expected)
