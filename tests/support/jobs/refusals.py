"""Jobs on a model of which each process has a part: what cannot be done with it says what can."""

import os
import time
from typing import Any

import torch

import gpipe
from tests.support.jobs.models import piped
from tests.support.open_models import batch_of, model_of
from tests.support.processes.digests import digests
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
    """Loads what a rank has itself, after a step has changed it; says whether all is as before."""
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
    """Gives another sample on the last rank, of other names."""
    sample = batch_of("llama")
    if rank == world - 1:
        del sample["attention_mask"], sample["labels"]
    how: Any = {"micro_batches": 4, "costs": "params", "seed": 5, "driver": "process"}
    pipe = gpipe.GPipe(model_of("llama"), world, sample=sample, **how)
    pipe.step(batch_of("llama"))


def dies(rank: int, world: int) -> None:
    pipe = piped(model_of("llama"), "llama", world, driver="process")
    pipe.step(batch_of("llama"))
    if rank == world - 1:
        os._exit(3)
    time.sleep(0.1)
    pipe.step(batch_of("llama"))
