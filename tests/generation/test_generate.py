"""What a pipe does to generate, seen from outside: how often blocks run, what its caches hold, what it refuses."""

import gc
import logging
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig

import gpipe
from gpipe.generation.loops import LOGGER, loops_of
from gpipe.runtime.threads import NAME
from gpipe.stages.messages import Cancelled
from tests.families.batches import batch
from tests.families.catalogue import named
from tests.support.prompted import NEW, asked, counted, ending_apart, generator, piped, prompts_of, seeded

FAMILY = named("llama")
ALONE = (
    "in generate, outside of the model, with micro-batch 0 (rows 0 to 1); each micro-batch has its own copies of "
    "logits processors and stopping criteria, which see only these rows"
)


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
def test_a_block_runs_once_for_each_new_token(driver: str) -> None:
    model, given = generator("llama"), prompts_of(FAMILY)
    length = given["input_ids"].shape[1]
    with piped(model, FAMILY, 3, driver=driver) as pipe:
        pipe.generate(**given, max_new_tokens=NEW, use_cache=True)  # in which it learns the way
        with counted(model, "LlamaDecoderLayer") as calls:
            pipe.generate(**given, max_new_tokens=NEW, use_cache=True)
    blocks = len(model.model.layers)
    assert calls == {
        (f"model.layers.{at}", 2, words): 3 * times
        for at in range(blocks)
        for words, times in ((length, 1), (1, NEW - 1))
    }


def test_an_encoder_runs_once_and_a_decoder_once_for_each_new_token() -> None:
    model, family = generator("t5"), named("t5")
    given = prompts_of(family)
    with piped(model, family, 3) as pipe:
        pipe.generate(**given, **asked("greedy"), min_new_tokens=NEW)
        with counted(model, "T5Block") as calls:
            pipe.generate(**given, **asked("greedy"), min_new_tokens=NEW)
    encoder = {name: times for (name, *_), times in calls.items() if name.startswith("encoder")}
    decoder = {(name, words): times for (name, _, words), times in calls.items() if name.startswith("decoder")}
    assert encoder == dict.fromkeys((f"encoder.block.{at}" for at in range(len(model.encoder.block))), 3)
    # and once more each while it encodes, by a forward of the whole model on the first word
    assert decoder == {(f"decoder.block.{at}", 1): 3 * (NEW + 1) for at in range(len(model.decoder.block))}


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
def test_a_micro_batch_whose_rows_have_ended_leaves(driver: str) -> None:
    model, given = generator("llama"), prompts_of(FAMILY)
    how, rounds = ending_apart(model, given)
    with piped(model, FAMILY, 2, driver=driver) as pipe:
        pipe.generate(**given, **how)
        with counted(model, "LlamaDecoderLayer") as calls:
            tokens = pipe.generate(**given, **how)
    assert torch.equal(tokens, model.generate(**given, **how))
    assert len(set(rounds)) > 1
    assert calls["model.layers.0", 2, 1] == sum(rounds)


LENGTHS: dict[str, Callable[[int], dict[str, Any]]] = {
    "tokens": lambda _: {"max_new_tokens": 9},
    "beams": lambda _: {"max_new_tokens": 9, "num_beams": 2},
    "all tokens": lambda length: {"max_length": length + 9, "do_sample": True},
    "a config": lambda _: {"generation_config": GenerationConfig(max_new_tokens=9)},
    "in pieces": lambda _: {"max_new_tokens": 9, "prefill_chunk_size": 4},
    "a fixed size": lambda _: {"max_new_tokens": 9, "cache_implementation": "static"},
}


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "t5", "mamba2"])
@pytest.mark.parametrize("way", LENGTHS)
def test_caches_hold_what_was_foretold(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (name, way) in (("t5", "in pieces"), ("t5", "a fixed size"), ("mamba2", "in pieces")):
        pytest.skip("transformers has it for decoders of attention")
    model, family, kept = generator(name), named(name), list[Any]()
    make = type(model)._prepare_cache_for_generation

    def prepare(self: Any, config: Any, kwargs: dict[str, Any], *rest: Any) -> None:
        make(self, config, kwargs, *rest)
        kept.append(next(value for key, value in kwargs.items() if key in ("past_key_values", "cache_params")))

    monkeypatch.setattr(type(model), "_prepare_cache_for_generation", prepare)
    given = prompts_of(family)
    how = {"eos_token_id": None, "use_cache": True, **LENGTHS[way](given["input_ids"].shape[1])}
    with piped(model, family, 2) as pipe:
        state = torch.get_rng_state()
        foretold = pipe.cache_bytes(given, **how)
        assert torch.equal(torch.get_rng_state(), state)
        kept.clear()
        pipe.generate(given, **how)
    assert len(kept) == 3
    assert sum(foretold) == sum(tensor.nbytes for cache in kept for tensor in tensors_of(cache)) > 0
    assert len(foretold) == 2
    assert name == "t5" or min(foretold) > 0


def test_a_layer_of_a_cache_takes_at_most_twice_its_bytes_while_it_takes_in_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, given, cat = generator("llama"), prompts_of(FAMILY), torch.cat
    alive, peak = weakref.WeakSet[Any](), 0

    def note(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal peak
        made = cat(*args, **kwargs)
        if sys._getframe(1).f_globals["__name__"] == DynamicCache.__module__:
            alive.add(made.untyped_storage())
            peak = max(peak, sum(storage.nbytes() for storage in alive))
        return made

    how = {**asked("greedy"), "eos_token_id": None}
    with piped(model, FAMILY, 2) as pipe:
        foretold = sum(pipe.cache_bytes(given, **how))
        pipe.generate(given, **how)
        monkeypatch.setattr(torch, "cat", note)
        pipe.generate(given, **how)
    of_a_layer = foretold // (3 * model.config.num_hidden_layers)  # for one micro-batch
    assert foretold < peak <= foretold + of_a_layer


def tensors_of(cache: Any) -> Iterator[Tensor]:
    if isinstance(cache, Tensor):
        yield cache
    elif isinstance(cache, dict):
        for item in cache.values():
            yield from tensors_of(item)
    elif isinstance(cache, list):
        for item in cache:
            yield from tensors_of(item)
    elif type(cache).__module__ == "transformers.cache_utils":
        yield from tensors_of(vars(cache))


class Greedy(nn.Module):
    """A model outside of transformers, with its own `generate` and without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 11)

    def forward(self, words: Tensor) -> Tensor:
        value = self.embed(words).cumsum(1)
        for block in self.blocks:
            value = block(value).relu() + value
        scores: Tensor = self.head(value)
        return scores

    def generate(self, inputs: Tensor, count: int) -> Tensor:
        for _ in range(count):
            inputs = torch.cat([inputs, self(inputs)[:, -1].argmax(-1, keepdim=True)], 1)
        return inputs


class Kinder(Greedy):
    """A model whose `generate` has different argument names and returns a dict."""

    def generate(self, ids: Tensor, count: int) -> Any:
        return {"tokens": super().generate(ids, count), "kind": "greedy"}


@pytest.mark.parametrize("make", [Greedy, Kinder])
def test_a_model_with_a_generate_of_its_own(make: type[Greedy]) -> None:
    torch.manual_seed(0)
    model, words = make().eval(), torch.randint(11, (5, 4))
    with gpipe.GPipe(model, 2, 2, sample=words) as pipe:
        found, expected = pipe.eval().generate(words, count=5), model.generate(words, count=5)
    assert str(found) == str(expected)  # of whole numbers


def test_settings_are_not_cut_by_rows_and_no_prompt_is_one_row() -> None:
    model, given, rng = generator("llama"), prompts_of(FAMILY), random.Random(8)
    words = [rng.randrange(4, 60) for _ in given["input_ids"]]  # as many as rows
    with piped(model, FAMILY, 2) as pipe:
        for name in ("eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
            how = {**asked("sampled"), name: torch.tensor(words)}
            torch.manual_seed(1)
            expected = model.generate(**given, **how)
            torch.manual_seed(1)
            assert torch.equal(pipe.generate(**given, **how), expected), name
        how = {**asked("greedy"), "bos_token_id": 5}
        assert torch.equal(pipe.generate(**how), model.generate(**how))


def test_what_generate_says_it_says_once(caplog: pytest.LogCaptureFixture) -> None:
    model, given = generator("llama"), prompts_of(FAMILY)
    with piped(model, FAMILY, 2) as pipe:
        said = list[list[str]]()
        for one in (model, pipe, pipe):
            caplog.clear()
            with caplog.at_level("WARNING"), listening(caplog.handler):
                one.generate(**given, max_new_tokens=2, max_length=20)
            said.append([record.getMessage() for record in caplog.records if record.name == LOGGER])
    assert said[1] == said[2] == said[0] != []


@contextmanager
def listening(handler: logging.Handler) -> Iterator[None]:
    logging.getLogger(LOGGER).addHandler(handler)  # transformers hands on nothing
    try:
        yield
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)


def test_what_cannot_be_is_refused_together() -> None:
    model = generator("llama")
    with piped(model, FAMILY, 2) as pipe:
        pipe.train()
        with pytest.raises(ValueError, match=r"(?s)assistant_model=.*streamer=.*training mode"):
            pipe.generate(**prompts_of(FAMILY), assistant_model=model, streamer=print)
        pipe.eval()
        layers, config = model.config.num_hidden_layers, GenerationConfig(return_dict_in_generate=True)
        with pytest.raises(ValueError, match=r"(?s)assistant_early_exit=.*past_key_values=.*return_dict"):
            pipe.generate(
                **prompts_of(FAMILY),
                assistant_early_exit=1,
                past_key_values=DynamicCache(),
                generation_config=config,
            )
        assert model.config.num_hidden_layers == layers
        with pytest.raises(ValueError, match="neither max_new_tokens= nor max_length="):
            pipe.cache_bytes(**prompts_of(FAMILY))
        with pytest.raises(TypeError, match="lock") as caught:
            pipe.generate(**prompts_of(FAMILY), stopping_criteria=[threading.Lock()])
        assert ALONE in caught.value.__notes__
    with (
        gpipe.GPipe([nn.Linear(2, 2)], 1, 1) as pipe,
        pytest.raises(ValueError, match=r"\[model-without-generate\]"),
    ):
        pipe.eval().generate(torch.ones(1, 2))


class ShortOfWordsError(Exception):
    pass


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
def test_an_error_keeps_its_type_and_no_thread_stays(driver: str) -> None:
    model, given = generator("llama"), prompts_of(FAMILY)

    def fail(words: Tensor, scores: Tensor) -> Tensor:
        if words.shape[1] > given["input_ids"].shape[1] + 2:
            raise ShortOfWordsError("no more words")
        return scores

    with piped(model, FAMILY, 2, driver=driver) as pipe:
        with pytest.raises(ShortOfWordsError, match="no more words") as caught:
            pipe.generate(**given, **asked("greedy"), logits_processor=[fail])
        assert caught.value.__notes__ == [ALONE]
        assert not [one for one in threading.enumerate() if "loop" in one.name and one.name.startswith(NAME)]
        assert all(map(torch.equal, seeded(model, given, "greedy"), seeded(pipe, given, "greedy")))

        def broken(*_: Any) -> None:
            raise ShortOfWordsError("a block")

        hook = model.model.layers[2].register_forward_pre_hook(broken)
        with pytest.raises(ShortOfWordsError, match="a block"):
            pipe.generate(**given, **asked("greedy"))
        hook.remove()
        assert all(map(torch.equal, seeded(model, given, "sampled"), seeded(pipe, given, "sampled")))


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
@pytest.mark.parametrize("where", ["a processor", "a block"])
def test_an_interrupt_ends_it_and_the_pipe_goes_on(driver: str, where: str) -> None:
    model, given = generator("llama"), prompts_of(FAMILY)
    main, heard = threading.main_thread().ident, threading.Event()
    assert main is not None
    words_seen = list[int]()

    def hear(*_: Any) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def press(*_: Any) -> None:
        words_seen.append(1)
        if len(words_seen) == 7 and driver == "lockstep" and where == "a block":  # in the thread that hears it
            signal.raise_signal(signal.SIGINT)
        if len(words_seen) == 7:
            signal.pthread_kill(main, signal.SIGINT)
            while not heard.wait(0.1):  # it came as the main thread was going to sleep, and is seen when it wakes
                signal.pthread_kill(main, signal.SIGINT)

    def process(words: Tensor, scores: Tensor) -> Tensor:
        press()
        return scores

    before = signal.signal(signal.SIGINT, hear)
    try:
        with piped(model, FAMILY, 2, driver=driver) as pipe:
            expected = seeded(pipe, given, "sampled")
            how: dict[str, Any] = {"logits_processor": [process]} if where == "a processor" else {}
            hook = model.model.layers[2].register_forward_pre_hook(press) if not how else None
            with pytest.raises(KeyboardInterrupt):
                pipe.generate(**given, **asked("greedy"), **how)
            assert len(words_seen) < 3 * NEW
            if hook is not None:
                hook.remove()
            assert not [one for one in threading.enumerate() if "loop" in one.name and one.name.startswith(NAME)]
            assert all(map(torch.equal, seeded(pipe, given, "sampled"), expected))
    finally:
        signal.signal(signal.SIGINT, before)


def test_who_has_a_loop_go_on_that_was_closed_does_not_wait_for_it() -> None:
    """Bug story: a rank that a second Ctrl-C had left behind waited for ever, and with it the next step."""
    given = prompts_of(FAMILY)
    (loop,) = loops_of(generator("llama"), [given], [len(given["input_ids"])], asked("greedy"), 1)
    assert loop.resume() is not None
    loop.close()
    with pytest.raises(Cancelled):
        loop.resume(None)


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
@pytest.mark.parametrize("what", ["generate", "step", "cache_bytes", "close"])
def test_a_processor_cannot_call_its_own_pipe(driver: str, what: str) -> None:
    model, given, data = generator("llama"), prompts_of(FAMILY), batch(FAMILY)

    def call(words: Tensor, scores: Tensor) -> Tensor:
        if what == "close":
            pipe.close()
        if what == "step":
            pipe.step(data)
        elif what == "cache_bytes":
            pipe.cache_bytes(**given, max_new_tokens=2)
        else:
            pipe.generate(**given, max_new_tokens=2)
        return scores

    with piped(model, FAMILY, 2, driver=driver) as pipe:
        with pytest.raises(RuntimeError, match=r"\[pipe-called-within-itself\]"):
            pipe.generate(**given, **asked("greedy"), logits_processor=[call])
        assert all(map(torch.equal, seeded(model, given, "greedy"), seeded(pipe, given, "greedy")))


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
@pytest.mark.parametrize("fails", [False, True])
def test_caches_are_dropped_at_once(driver: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, alive = generator("llama"), prompts_of(FAMILY), weakref.WeakSet[DynamicCache]()
    make = DynamicCache.__init__

    def note(self: DynamicCache, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        alive.add(self)

    def fail(words: Tensor, scores: Tensor) -> Tensor:
        if fails and words.shape[1] > given["input_ids"].shape[1] + 2:
            assert len(alive) == 3
            raise ShortOfWordsError("no more words")
        return scores

    with piped(model, FAMILY, 2, driver=driver) as pipe:
        pipe.generate(**given, **asked("greedy"))
        gc.collect()
        monkeypatch.setattr(DynamicCache, "__init__", note)
        gc.disable()
        try:
            with suppress(ShortOfWordsError):
                pipe.generate(**given, **asked("greedy"), logits_processor=[fail])
            assert not alive
        finally:
            gc.enable()


def test_it_goes_on_to_train_and_follows_new_weights() -> None:
    model, given, data = generator("llama"), prompts_of(FAMILY), batch(FAMILY)
    with piped(model, FAMILY, 2) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        before = seeded(pipe, given, "greedy")
        pipe.train().step(data)
        optimizer.step()
        pipe.eval()
        found, expected = seeded(pipe, given, "greedy"), seeded(model, given, "greedy")
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], before[0])
