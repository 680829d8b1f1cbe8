"""Models that generate, prompts for them, and what `generate` is asked for."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import gpipe
from tests.families.batches import batch
from tests.families.catalogue import named
from tests.families.family import Family, Task, build

ENDS, PADDING = 3, 0
NEW = 6
WAYS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several of each": {"do_sample": True, "num_return_sequences": 2},
    "ending early": {"eos_token_id": [*range(ENDS, 60)], "do_sample": True},
    "repeated less": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "without a cache": {"use_cache": False},
    "a cache of a fixed size": {"cache_implementation": "static"},
    "a prompt in pieces": {"prefill_chunk_size": 4},
}


def generator(name: str) -> Any:
    """A model of a family, in evaluation."""
    return build(named(name), dropout=False).eval()


def prompts_of(family: Family, rows: int = 6) -> dict[str, Tensor]:
    """What `generate` takes: prompts of several lengths, padded where their family has it."""
    given = batch(family, rows=rows)
    given.pop("labels", None)
    given = {name: value for name, value in given.items() if not name.startswith("decoder")}
    if family.task is Task.CAUSAL:
        given = {name: value.flip(1) for name, value in given.items()}
    elif family.task is Task.IMAGE_TEXT and "attention_mask" in given:
        given["attention_mask"] = given["attention_mask"].flip(1)
    return given


def asked(way: str) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "pad_token_id": PADDING, "eos_token_id": ENDS, "use_cache": True, **WAYS[way]}


def seeded(model: Any, given: Mapping[str, Tensor], way: str, seed: int = 3) -> tuple[Tensor, Tensor]:
    """What `generate` of a model, or of a pipe, gives, and where torch's generator is then."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens: Tensor = model.generate(**given, **asked(way))
        return tokens, torch.get_rng_state()


def piped(model: Any, family: Family, partitions: int, micro_batches: int = 3, **how: Any) -> gpipe.GPipe:
    how = {"costs": "params", "driver": "lockstep", **how}
    return gpipe.GPipe(model, partitions, micro_batches, sample=batch(family), **how).eval()
