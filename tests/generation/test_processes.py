"""Over processes a pipe generates the tokens that the model generates, and each process gets them."""

from typing import Any

import pytest

from tests.families.catalogue import named
from tests.support.jobs import generation as jobs
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers
from tests.support.prompted import NEW, asked, generator, prompts_of, seeded
from tests.support.quantized import base
from tests.support.quantized import batch as quantized_batch
from tests.support.quantized import piped as quantized_pipe

MOST = ["greedy", "sampled", "beams", "sampled beams", "ending early", "without a cache"]
CASES: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {
    ("llama", "line"): (3, {}),
    ("llama", "loop"): (2, {"schedule": "interleaved", "stages_per_rank": 2}),
    ("gemma3_text", "vee"): (2, {"schedule": "zb_v"}),
    ("t5", "line"): (2, {}),
    ("mixtral", "line"): (2, {"micro_batches": 1}),
}


@pytest.mark.parametrize(("name", "placement"), CASES)
def test_each_process_gets_the_tokens_of_the_model(name: str, placement: str, pool: WorkerPool) -> None:
    model, given = generator(name), prompts_of(named(name))
    world, how = CASES[name, placement]
    expected = {f"{way} {what}": one for way in MOST for what, one in jobs.noted(*seeded(model, given, way)).items()}
    for found in answers(pool.run(jobs.generate, name, MOST, how, world=world)):
        assert found == expected


@pytest.mark.parametrize("ends", [False, True])
def test_a_block_runs_once_for_each_new_token_until_its_rows_have_ended(ends: bool, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.ran, "llama", "LlamaDecoderLayer", ends, world=2))
    own = [sorted(calls) for calls, _ in found]
    assert [*own[0], *own[1]] == [f"model.layers.{at}" for at in range(len(generator("llama").model.layers))]
    for calls, rounds in found:
        assert (len(set(rounds)) > 1) == ends
        assert {*calls.values()} == {sum(rounds)}


def test_a_decoder_block_runs_once_for_each_new_token(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.ran, "t5", "T5Block", False, world=2))
    calls = {name: times for own, _ in found for name, times in own.items()}
    # the first word has no cache yet, and is also what the encoder's forward is given beside
    assert calls == {f"decoder.block.{at}": 3 * (NEW + 1) for at in range(len(generator("t5").decoder.block))}


@pytest.mark.parametrize("name", ["nf4", "8 bits"])
def test_a_quantized_base_generates(name: str, pool: WorkerPool) -> None:
    pytest.importorskip("bitsandbytes")
    model, given = base(name).eval(), {"input_ids": quantized_batch()["input_ids"][:, :5]}
    with quantized_pipe(model, 2, driver="lockstep").eval() as pipe:
        foretold, expected = pipe.cache_bytes(given, **asked("greedy")), seeded(pipe, given, "greedy")
    for found in answers(pool.run(jobs.quantized, name, world=2)):
        assert found == {"foretold": foretold, **jobs.noted(*expected)}


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_caches_hold_what_was_foretold(name: str, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.held, name, world=2))
    for rank, (foretold, held) in enumerate(found):
        assert foretold == found[0][0]
        assert held == foretold[rank] > 0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("settings", "num_beams= is 1 on rank 0 and 2 on rank 1"),
        ("words", "rank 1 has chosen other words than the rank before it"),
        ("clock", "max_time"),
        ("a fixed size", "give cache_implementation='dynamic'"),
        ("training", "rank 1 failed: ValueError: the pipe is in training mode"),
        ("a setting", "rank 1 failed: ValueError: streamer= is given"),
        ("raises", "no such word"),
    ],
)
def test_processes_that_do_not_agree_all_end(what: str, said: str) -> None:
    outcomes = run_ranks(2, jobs.apart, what)
    assert all(outcome.error for outcome in outcomes), outcomes
    assert any(said in outcome.told for outcome in outcomes), outcomes
