"""Jobs on generation: each process keeps the caches of its own layers, and gets all tokens."""

from typing import Any

from torch import Tensor

from tests.families.catalogue import named
from tests.support.processes.digests import Digests, digest
from tests.support.prompted import NEW, asked, counted, ending_apart, generator, piped, prompts_of, seeded


def noted(tokens: Tensor, state: Tensor) -> dict[str, str]:
    return {"tokens": digest(tokens), "generator": digest(state)}


def generate(rank: int, world: int, name: str, ways: list[str], how: dict[str, Any]) -> Digests:
    """What a rank gets; that of the first stage is given the prompts, others none, and another seed."""
    family, found = named(name), dict[str, str]()
    with piped(generator(name), family, world, driver="process", **how) as pipe:
        given = prompts_of(family) if pipe.reads_inputs else {}
        for way in ways:
            for what, one in noted(*seeded(pipe, given, way, seed=3 + rank)).items():
                found[f"{way} {what}"] = one
    return found


def ran(rank: int, world: int, name: str, block: str, ends: bool) -> tuple[dict[str, int], list[int]]:
    """How often each block of a rank ran for one new word, and how often it was to, by micro-batch."""
    family, model = named(name), generator(name)
    given = prompts_of(family)
    how, rounds = {**asked("greedy"), "min_new_tokens": NEW}, [NEW - 1] * 3
    if ends:
        how, rounds = ending_apart(model, given)
    with piped(model, family, world, driver="process") as pipe:
        pipe.generate(given, **how)
        with counted(model, block) as calls:
            pipe.generate(given, **how)
    return {path: times for (path, _, words), times in calls.items() if words == 1}, rounds


def held(rank: int, world: int, name: str) -> tuple[list[int], int]:
    """What the caches of all ranks were to hold, and what those of this one do."""
    family, kept = named(name), list[Any]()
    model = generator(name)
    make = type(model)._prepare_cache_for_generation

    def prepare(self: Any, config: Any, kwargs: dict[str, Any], *rest: Any) -> None:
        make(self, config, kwargs, *rest)
        kept.append(kwargs["past_key_values"])

    type(model)._prepare_cache_for_generation = prepare
    try:
        with piped(model, family, world, driver="process") as pipe:
            given = prompts_of(family)
            predicted = pipe.cache_bytes(given, max_new_tokens=NEW, use_cache=True)
            kept.clear()
            pipe.generate(given, max_new_tokens=NEW, use_cache=True)
    finally:
        type(model)._prepare_cache_for_generation = make
    layers = [vars(layer) for cache in kept for layer in cache.layers]
    own = [one for one in layers if not one["keys"].is_meta]
    return predicted, sum(value.nbytes for one in own for value in one.values() if isinstance(value, Tensor))


def quantized(rank: int, world: int, name: str) -> dict[str, Any]:
    """What a rank of a pipe with a quantized base is told of caches, and gets."""
    from tests.support.quantized import base, batch, piped

    with piped(base(name), world, driver="process").eval() as pipe:
        given = {"input_ids": batch()["input_ids"][:, :5]}
        return {
            "foretold": pipe.cache_bytes(given, **asked("greedy")),
            **noted(*seeded(pipe, given, "greedy")),
        }


def apart(rank: int, world: int, what: str) -> None:
    """Generates in processes that do not agree."""
    family = named("llama")
    with piped(generator("llama"), family, world, driver="process") as pipe:
        settings = asked("greedy")
        if what == "settings":
            settings["num_beams"] = 1 + rank
        elif what == "words":
            settings["logits_processor"] = [_Other(rank)]
        elif what == "clock":
            settings["max_time"] = 1e-9
        elif what == "a fixed size":
            settings["cache_implementation"] = "static"
        elif what == "training":
            pipe.train(rank == 1)
        elif what == "a setting":
            settings["streamer"] = print if rank else None
        elif what == "raises":
            settings["logits_processor"] = [_Raising(rank)]
        try:
            pipe.generate(prompts_of(family), **settings)
        finally:  # the next call is of all again, and None is no prompt
            prompts = prompts_of(family) if pipe.reads_inputs else {"input_ids": None, "attention_mask": None}
            pipe.eval().generate(prompts, **asked("greedy"))


class _Other:
    """Has the second rank choose other words than the first."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, words: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1) if self._rank and words.shape[1] > 14 else scores


class _Raising(_Other):
    def __call__(self, words: Tensor, scores: Tensor) -> Tensor:
        if self._rank and words.shape[1] > 13:
            raise KeyError("no such word")
        return scores
