"""Tests unmodified models of other libraries: x-transformers, and transformers with adapters and wrappers."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe
from tests.support.beside_plain import SEED, M
from tests.support.handwritten import VOCABULARY, cross_entropy, word_targets, words
from tests.support.plain_loop import same_bits, weights_of
from tests.support.planned import pipe_by_costs

transformers: Any = pytest.importorskip("transformers")

OF_X: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "decoder": ("Decoder", {}, {}),
    "encoder": ("Encoder", {"attn_dropout": 0.1, "ff_dropout": 0.1}, {"emb_dropout": 0.1}),
    "rotary": ("Decoder", {"rotary_pos_emb": True}, {}),
    "memory": ("Decoder", {}, {"num_memory_tokens": 2}),
    "a bias that blocks are given": ("Decoder", {"rel_pos_bias": True}, {}),
    "residual streams": ("Decoder", {"num_residual_streams": 2}, {"tie_embedding": True}),
}


def build_x(kind: str, layers: dict[str, Any], wrapper: dict[str, Any]) -> nn.Module:
    library: Any = pytest.importorskip("x_transformers")
    inner = getattr(library, kind)(dim=16, depth=3, heads=2, attn_dim_head=8, **layers)
    model: nn.Module = library.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=8, attn_layers=inner, **wrapper)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_X)
def test_x_transformers_train_as_the_model(name: str) -> None:
    ways: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (4, {"schedule": "1f1b", "driver": "lockstep"}),
        (2, {"schedule": "zb_v", "remat": "never"}),
    ]
    for partitions, settings in ways:
        with made(build_x(*OF_X[name]), partitions, sample=words(5), **settings) as pipe:
            assert pipe.verify(words(9), word_targets(9), cross_entropy, against="model").equal


def llama(**settings: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **{"num_key_value_heads": 2, **settings},
    )  # fmt: skip
    with weights_of(3):
        made: nn.Module = transformers.LlamaForCausalLM(config).train()
    return made


def batch(rows: int = 8, length: int = 10) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(rows))
    real = torch.arange(length) < length - torch.arange(rows)[:, None] % 3
    return {"input_ids": ids * real, "attention_mask": real.long(), "labels": ids.where(real, -100)}


def made(model: nn.Module, partitions: int = 3, **settings: Any) -> gpipe.GPipe:
    given: dict[str, Any] = {"sample": batch(4, 7), "seed": SEED}
    return pipe_by_costs(model, partitions, M, **given | settings)


Around = Callable[[], AbstractContextManager[Any]]


def rope(kind: str, **settings: Any) -> nn.Module:
    """Returns a model whose rotary embeddings are built for 8 tokens."""
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **settings}
    return llama(max_position_embeddings=8, rope_parameters=parameters)


def test_a_rope_that_follows_the_length_is_refused_where_it_changes_and_the_next_step_is_as_before() -> None:
    # Each layer had frequencies of its own: a recompute found those of a later micro-batch, the user's model none.
    with pytest.raises(ValueError, match=r"inv_freq .*\[buffer-between-blocks\]"):
        made(rope("dynamic"), sample=batch(4, 12))
    model = rope("dynamic")
    pipe = made(model)
    before = copy.deepcopy([*model.buffers()])
    with pytest.raises(ValueError, match=r"inv_freq .*\[buffer-between-blocks\]"):
        pipe.step(batch(8, 12))
    assert pipe.verify(batch(8, 7), against="model").equal
    assert all(map(same_bits, model.buffers(), before))


@pytest.mark.filterwarnings("ignore")
def test_a_rope_that_is_written_to_in_place_is_one_layers() -> None:
    # The values were those that stood there, so every layer wrote its own into the model's one buffer.
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 8}
    model = rope("longrope", **factors)
    pipe = made(model)
    for whole in (batch(8, 7), batch(8, 12), batch(8, 6)):
        assert pipe.verify(whole, against="model").equal
        pipe.step(whole)
    assert "model.rotary_emb" in gpipe.layers_of(model, batch(4, 7))[0].modules


def with_checkpointing(model: Any, *, reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    same: nn.Module = model
    return same


def with_compiled_blocks(model: Any) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    same: nn.Module = model
    return same


def with_adapters(model: nn.Module) -> nn.Module:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with weights_of(4):
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted.train()


def with_adaption_prompts(model: nn.Module) -> nn.Module:
    """Returns an adapted model, whose `forward` attribute is the method of the model inside."""
    peft: Any = pytest.importorskip("peft")
    config = peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM")
    with weights_of(4):
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted.train()


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], Around]] = {
    "as it is": (lambda model: model, nullcontext),
    "checkpointing": (partial(with_checkpointing, reentrant=False), nullcontext),
    "checkpointing, reentrant": (partial(with_checkpointing, reentrant=True), nullcontext),
    "compiled blocks": (with_compiled_blocks, nullcontext),
    "autocast": (lambda model: model, partial(torch.autocast, "cpu", torch.bfloat16)),
    "adapters": (with_adapters, nullcontext),
    "adaption prompts": (with_adaption_prompts, nullcontext),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_what_people_put_around_a_model_gives_the_bits_of_the_model(way: str) -> None:
    change, around = WAYS[way]
    ways: list[dict[str, Any]] = [{}, {"remat": "never", "schedule": "1f1b", "driver": "lockstep"}]
    for settings in ways:
        with made(change(llama(attention_dropout=0.1)), **settings) as pipe, around():
            assert pipe.verify(batch(), against="model").equal


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_saved_after_steps(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    model = with_adapters(llama())
    pipe = made(model)
    trained = [p for p in pipe.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    pipe.step(batch())
    optimizer.step()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = peft.PeftModel.from_pretrained(llama(), tmp_path)
    values = model.state_dict()
    assert all(same_bits(value, values[name]) for name, value in again.state_dict().items())


def grouped(pipe: gpipe.GPipe) -> torch.optim.Optimizer:
    """Returns parameter groups by name, as a Trainer creates them."""
    named = dict(pipe.named_parameters())
    norms = [p for name, p in named.items() if "norm" in name]
    others = [p for name, p in named.items() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def train(pipe: gpipe.GPipe, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[Tensor]:
    for _ in range(steps):
        yield pipe.step(batch())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_pipe_trains_alike_and_apart(again: Callable[[gpipe.GPipe], gpipe.GPipe]) -> None:
    pipe = made(llama(attention_dropout=0.1))
    pipe.step(batch())
    pipe.zero_grad()
    other = again(pipe)
    assert not {id(p) for p in pipe.parameters()} & {id(p) for p in other.parameters()}
    one, two = pipe.step(batch()), other.step(batch())
    assert same_bits(one, two)
    assert all(same_bits(p.grad, q.grad) for p, q in zip(pipe.parameters(), other.parameters(), strict=True))


def test_modes_are_those_of_the_model_whoever_sets_them() -> None:
    model = llama(attention_dropout=0.3)
    pipe = made(model)
    drawn = pipe.step(batch())
    model.eval()
    with torch.no_grad():
        expected = [model(**{n: v.tensor_split(M)[m] for n, v in batch().items() if n != "labels"}) for m in range(M)]
        for _ in range(2):
            found = pipe(**{name: value for name, value in batch().items() if name != "labels"})
            assert torch.allclose(found.logits, torch.cat([one.logits for one in expected]), atol=1e-6)
            pipe.train()
            assert all(module.training for module in model.modules())
            pipe.eval()
            assert not any(module.training for module in model.modules())
    model.train()
    pipe.step_number = 0
    assert same_bits(pipe.step(batch()), drawn)


def test_the_model_generates_and_is_saved_after_steps_and_its_config_is_as_before(tmp_path: Path) -> None:
    model = llama()
    config = copy.deepcopy(model.config.to_dict())  # type: ignore[union-attr,operator]
    pipe = made(model)
    optimizer = grouped(pipe)
    list(train(pipe, optimizer, 2))
    assert model.config.to_dict() == config  # type: ignore[union-attr,operator]
    model.eval()
    prompt = torch.tensor([[5, 6, 7]])
    said = model.generate(prompt, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again.generate(prompt, max_new_tokens=4, do_sample=False), said)
    assert not [n for n, v in again.state_dict().items() if not same_bits(v, model.state_dict()[n])]


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # by the configuration, or by what is given
    "states, by config": ({"output_hidden_states": True}, {}),
    "attentions, by config": ({"output_attentions": True, "attn_implementation": "eager"}, {}),
    "states": ({}, {"output_hidden_states": True}),
    "some states": ({}, {"output_hidden_states": [0, -2]}),
}


def test_verify_compares_outputs_of_calls_with_a_model_without_a_cache() -> None:
    """Bug story: the reference loop filled a KV cache, and its layout in memory changed the rounding of attention."""
    with made(llama(num_key_value_heads=4, attention_dropout=0.1)) as pipe:
        report = pipe.verify(batch(8, 8), against="model")
    assert report.equal, str(report)


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_collected_inside_of_blocks_is_part_of_the_output(asked: str) -> None:
    of_config, given = ASKED[asked]
    model = llama(**of_config)
    pipe = made(model, sample={**batch(4, 7), **given})
    assert pipe.verify({**batch(), **given}, against="model").equal
    hooks = [len(module._forward_hooks) for module in model.modules()]
    pipe.eval()
    with torch.no_grad():
        output, own = pipe({**batch(), **given}), model(**batch(), **given, use_cache=False)
    for key in {"hidden_states", "attentions"} & own.keys():
        assert [found is None for found in output[key]] == [one is None for one in own[key]]
    assert output.keys() == own.keys() > {"logits"}
    assert max(hooks) == 1  # transformers' own, in the model, once


@pytest.mark.parametrize("costs", ["params", None])
def test_states_of_a_last_block_that_is_the_output_are_collected_from_the_first_step_on(costs: Any) -> None:
    # transformers put its hooks on while the last layer was tried alone, which then lost them: every step failed.
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with weights_of(3):
        model = transformers.BertModel(config, add_pooling_layer=False)
    rows = batch()["input_ids"]
    given = {"input_ids": rows, "output_hidden_states": True}

    def loss_fn(output: Any, target: Tensor) -> Any:
        return sum(state[..., at].mean() for at, state in enumerate(output.hidden_states)) + output[0].mean()

    make: Any = pipe_by_costs if costs else gpipe.GPipe
    with make(model, 2, M, sample=given) as pipe:
        assert pipe.verify(given, rows, loss_fn, reduction="mean", against="model").equal
    assert [len(layer._forward_hooks) for layer in model.encoder.layer] == [1, 1, 1]


def test_collecting_may_begin_and_end_between_steps() -> None:
    model = llama()
    layers = gpipe.layers_of(model, batch(4, 7))
    pipe = pipe_by_costs(layers, 3, M, costs="params", seed=SEED)
    for collects in (False, True, False):
        model.config.output_hidden_states = collects  # type: ignore[union-attr]
        assert pipe.verify(batch(), against="model").equal
        pipe.step(batch())
    assert len(layers.traced.traces) == 4  # with labels and, in verify, without: hooks are no reason for another


def test_a_loss_of_hidden_states_has_the_gradients_of_the_model() -> None:
    def loss_fn(output: Any, target: Tensor) -> Tensor:
        states = [state.tanh().mean() * (1 + at) for at, state in enumerate(output.hidden_states)]
        return sum(states, output.logits.mean())

    given = {name: value for name, value in batch().items() if name != "labels"}
    for partitions in (1, 2, 4):
        with made(llama(output_hidden_states=True), partitions, sample=given) as pipe:
            assert pipe.verify(given, given["input_ids"], loss_fn, against="model").equal


def test_a_cache_that_is_asked_for_or_given_is_refused_by_name() -> None:
    def cached() -> dict[str, Any]:
        return {**batch(4, 7), "past_key_values": transformers.DynamicCache()}

    told = r"past_key_values: .* DynamicCache.*\[cache-in-inputs\]"
    with pytest.raises(ValueError, match=told):
        made(llama(), sample=cached())
    pipe = made(llama())
    with pytest.raises(ValueError, match=told):
        pipe.step(cached())
    pipe.step(batch())
    with (
        pytest.raises(TypeError, match=r"DynamicCache.*use_cache=False\. \[tensors-in-unregistered-class\]"),
        torch.no_grad(),
    ):
        pipe(**batch(), use_cache=True)


def test_a_call_leaves_out_the_cache_of_a_model_within() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder, decoder = (
        transformers.BertConfig(**sizes, vocab_size=64, is_decoder=reads, add_cross_attention=reads)
        for reads in (False, True)
    )
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder, decoder_start_token_id=1, pad_token_id=0
    )
    with weights_of(3):
        model = transformers.EncoderDecoderModel(config=config).eval()
    given = {"input_ids": batch()["input_ids"], "decoder_input_ids": batch()["input_ids"]}
    pipe = made(model, sample=given)
    with torch.no_grad():
        found = pipe(given)
        assert "past_key_values" not in found
        assert torch.allclose(found.logits, model(**given).logits, atol=1e-6)


def test_other_keys_are_recorded_when_they_come() -> None:
    pipe = made(llama())
    pipe.step(batch())
    assert pipe.verify({"input_ids": batch()["input_ids"], "labels": batch()["labels"]}, against="model").equal
