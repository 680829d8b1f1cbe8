"""Models that generate, prompts for them, and what `generate` is asked for."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from tests.families.batches import batch
from tests.families.catalogue import named
from tests.families.family import Family, Task, build
from tests.support.planned import pipe_by_costs

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
    return pipe_by_costs(model, partitions, micro_batches, sample=batch(family), **how).eval()


@contextmanager
def counted(model: nn.Module, name: str) -> Iterator[Counter[tuple[str, int, int]]]:
    """How often each block ran, by its name, its rows and its words."""
    found: Counter[tuple[str, int, int]] = Counter()

    def count(block: nn.Module, args: Any, kwargs: Any) -> None:
        found[names[block], *(kwargs["hidden_states"] if not args else args[0]).shape[:2]] += 1

    blocks = [(path, block) for path, block in model.named_modules() if type(block).__name__ == name]
    names = {block: path for path, block in blocks}
    hooks = [block.register_forward_pre_hook(count, with_kwargs=True) for _, block in blocks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def ending_apart(model: Any, given: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[int]]:
    """Settings with which rows end at different words, and how many words each micro-batch of two rows decodes."""
    how = {**asked("greedy"), "max_new_tokens": 12}
    tokens = model.generate(**given, **{**how, "eos_token_id": None})[:, -12:]
    ends = [int(tokens[2, 3]), int(tokens[3, 4])]  # which rows 2 and 3 come to; they are a micro-batch
    rows = [min(int((row == one).nonzero()[0]) if (row == one).any() else 11 for one in ends) for row in tokens]
    return {**how, "eos_token_id": ends}, [max(rows[first : first + 2]) for first in (0, 2, 4)]
