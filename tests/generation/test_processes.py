"""Over processes a pipe generates the tokens that the model generates, and each process gets them."""

from typing import Any

import pytest
from torch import Tensor

from tests.families.catalogue import named
from tests.support.processes.digests import Digests, digest
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers
from tests.support.prompted import NEW, asked, counted, ending_apart, generator, piped, prompts_of, seeded
from tests.support.quantized import base
from tests.support.quantized import batch as quantized_batch
from tests.support.quantized import piped as quantized_pipe


def noted(tokens: Tensor, state: Tensor) -> dict[str, str]:
    return {"tokens": digest(tokens), "generator": digest(state)}


def generate(rank: int, world: int, name: str, ways: list[str], how: dict[str, Any]) -> Digests:
    """Generates on one rank. Only the first rank receives the prompts, and all others have a different seed."""
    family, found = named(name), dict[str, str]()
    with piped(generator(name), family, world, driver="process", **how) as pipe:
        given = prompts_of(family) if pipe.reads_inputs else {}
        for way in ways:
            for what, one in noted(*seeded(pipe, given, way, seed=3 + rank)).items():
                found[f"{way} {what}"] = one
    return found


def ran(rank: int, world: int, name: str, block: str, ends: bool) -> tuple[dict[str, int], list[int]]:
    """Returns how often each block of a rank ran for one new token, and the expected count per micro-batch."""
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


def held_here(rank: int, world: int, name: str) -> tuple[list[int], int]:
    """Returns the predicted size of the caches of all ranks, and the actual size on this rank."""
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
    """Returns the predicted cache sizes and the tokens of a pipe with a quantized base model."""
    with quantized_pipe(base(name), world, driver="process").eval() as pipe:
        given = {"input_ids": quantized_batch()["input_ids"][:, :5]}
        return {
            "foretold": pipe.cache_bytes(given, **asked("greedy")),
            **noted(*seeded(pipe, given, "greedy")),
        }


def apart(rank: int, world: int, what: str) -> None:
    """Generates in processes whose arguments differ."""
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
    """Makes the second rank choose different tokens than the first."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, words: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1) if self._rank and words.shape[1] > 14 else scores


class _Raising(_Other):
    def __call__(self, words: Tensor, scores: Tensor) -> Tensor:
        if self._rank and words.shape[1] > 13:
            raise KeyError("no such word")
        return scores


MOST = ["greedy", "sampled", "beams", "sampled beams", "ending early", "without a cache"]
CASES: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {
    ("llama", "line"): (3, {}),
    ("llama", "loop"): (2, {"schedule": "interleaved"}),
    ("gemma3_text", "vee"): (2, {"schedule": "zb_v"}),
    ("t5", "line"): (2, {}),
    ("mixtral", "line"): (2, {"micro_batches": 1}),
}


@pytest.mark.parametrize(("name", "placement"), CASES)
def test_each_process_gets_the_tokens_of_the_model(name: str, placement: str, pool: WorkerPool) -> None:
    model, given = generator(name), prompts_of(named(name))
    world, how = CASES[name, placement]
    expected = {f"{way} {what}": one for way in MOST for what, one in noted(*seeded(model, given, way)).items()}
    for found in answers(pool.run(generate, name, MOST, how, world=world)):
        assert found == expected


@pytest.mark.parametrize("ends", [False, True])
def test_a_block_runs_once_for_each_new_token_until_its_rows_have_ended(ends: bool, pool: WorkerPool) -> None:
    found = answers(pool.run(ran, "llama", "LlamaDecoderLayer", ends, world=2))
    own = [sorted(calls) for calls, _ in found]
    assert [*own[0], *own[1]] == [f"model.layers.{at}" for at in range(len(generator("llama").model.layers))]
    for calls, rounds in found:
        assert (len(set(rounds)) > 1) == ends
        assert {*calls.values()} == {sum(rounds)}


def test_a_decoder_block_runs_once_for_each_new_token(pool: WorkerPool) -> None:
    found = answers(pool.run(ran, "t5", "T5Block", False, world=2))
    calls = {name: times for own, _ in found for name, times in own.items()}
    # the first word has no cache yet, and is also what the encoder's forward is given beside
    assert calls == {f"decoder.block.{at}": 3 * (NEW + 1) for at in range(len(generator("t5").decoder.block))}


@pytest.mark.parametrize("name", ["nf4", "8 bits"])
def test_a_quantized_base_generates(name: str, pool: WorkerPool) -> None:
    pytest.importorskip("bitsandbytes")
    model, given = base(name).eval(), {"input_ids": quantized_batch()["input_ids"][:, :5]}
    with quantized_pipe(model, 2, driver="lockstep").eval() as pipe:
        foretold, expected = pipe.cache_bytes(given, **asked("greedy")), seeded(pipe, given, "greedy")
    for found in answers(pool.run(quantized, name, world=2)):
        assert found == {"foretold": foretold, **noted(*expected)}


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_caches_hold_what_was_foretold(name: str, pool: WorkerPool) -> None:
    found = answers(pool.run(held_here, name, world=2))
    for rank, (foretold, held) in enumerate(found):
        assert foretold == found[0][0]
        assert held == foretold[rank] > 0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("settings", "num_beams= is 1 on rank 0 and 2 on rank 1"),
        ("words", "[generation-differs-between-processes]"),
        ("clock", "max_time"),
        ("a fixed size", "Use cache_implementation='dynamic'"),
        ("training", "rank 1 failed: ValueError: The pipe is in training mode"),
        ("a setting", "rank 1 failed: ValueError: streamer= is not supported"),
        ("raises", "no such word"),
    ],
)
def test_processes_that_do_not_agree_all_end(what: str, said: str) -> None:
    outcomes = run_ranks(2, apart, what)
    assert all(outcome.error for outcome in outcomes), outcomes
    assert any(said in outcome.told for outcome in outcomes), outcomes
