"""Tests that all processes reject operations that need the whole model, and settings that differ between them."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs.models import piped
from tests.support.open_models import batch_of, model_of
from tests.support.planned import pipe_by_costs
from tests.support.processes.digests import digests
from tests.support.processes.launch import Job, WorkerPool, run_ranks
from tests.support.processes.outcome import answers
from tests.support.said import said

Json = Any


def of_a_part(rank: int, world: int, folder: str) -> dict[str, str]:
    model: Any = model_of("llama")
    given = batch_of("llama")
    with piped(model, "llama", world, driver="process") as pipe:
        pipe.step(given)
        words = given["input_ids"][:1, :4]
        return {
            "generate": said(lambda: model.generate(words, max_new_tokens=2)),
            "call": said(lambda: model(**given)),
            "save": said(lambda: model.save_pretrained(f"{folder}/{rank}")),
        }


def load_own(rank: int, world: int) -> bool:
    """Loads the weights of a rank after a step has changed them. Returns whether they are as before the step."""
    with piped(model_of("t5"), "t5", world, driver="process") as pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.add_(1)
        pipe.load_state_dict(before)
        return digests(pipe.state_dict()) == digests(before)


def other_kind(rank: int, world: int) -> list[Json]:
    with piped(model_of("llama"), "llama", world, driver="process") as pipe:
        given = batch_of("llama")
        odd = {**given, "position_ids": torch.arange(12).expand(8, 12)}
        refused = said(lambda: pipe.step(odd))
        return [refused, pipe.step(given).isfinite().item()]


def other_model(rank: int, world: int) -> None:
    piped(model_of("llama" if rank < world - 1 else "gpt2"), "llama", world, driver="process")


def other_sample(rank: int, world: int) -> None:
    """Passes a sample with different keys on the last rank."""
    sample = batch_of("llama")
    if rank == world - 1:
        del sample["attention_mask"], sample["labels"]
    how: Any = {"micro_batches": 4, "costs": "params", "seed": 5, "driver": "process"}
    pipe = pipe_by_costs(model_of("llama"), world, sample=sample, **how)
    pipe.step(batch_of("llama"))


def dies(rank: int, world: int) -> None:
    pipe = piped(model_of("llama"), "llama", world, driver="process")
    pipe.step(batch_of("llama"))
    if rank == world - 1:
        os._exit(3)
    time.sleep(0.1)
    pipe.step(batch_of("llama"))


def test_what_needs_the_whole_model_names_the_remedy(tmp_path: Path, pool: WorkerPool) -> None:
    first, other = answers(pool.run(of_a_part, str(tmp_path), world=2))
    assert other.pop("save") == "None"  # transformers writes on the first rank alone
    assert "meta tensor" in first.pop("save")  # torch's words, of what a state_dict has without values
    for told in (*first.values(), *other.values()):
        assert "[remote-parameter]" in told
        assert "gpipe.save_weights(folder, pipe)" in told


def test_a_rank_loads_what_it_has_itself(pool: WorkerPool) -> None:
    assert answers(pool.run(load_own, world=2)) == [True, True]


def test_inputs_of_another_kind_are_refused_everywhere(pool: WorkerPool) -> None:
    found = answers(pool.run(other_kind, world=2))
    for told, goes_on in found:
        assert "[inputs-not-traced]" in told
        assert goes_on


@pytest.mark.parametrize(
    ("job", "what"),
    [
        (other_model, "layer transformer.wte is "),
        (other_sample, "sample is ['attention_mask', 'input_ids', 'labels'] on rank 0 and "),
    ],
)
def test_what_differs_between_ranks_is_refused_everywhere(job: Job, what: str, pool: WorkerPool) -> None:
    outcomes = pool.run(job, world=2)
    for outcome in outcomes:
        assert outcome.error in ("ValueError", "RemoteError"), str(outcome)
    assert any(what in outcome.told for outcome in outcomes)


def test_a_rank_that_dies_is_noticed_by_all() -> None:
    first, _ = run_ranks(2, dies)
    assert first.error == "RemoteError", str(first)
