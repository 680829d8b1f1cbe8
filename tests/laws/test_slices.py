"""Slices of a sequence: the bits of the plain loop over slices, and what the whole gives but for rounding."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

import gpipe
from gpipe.profiling.stored import Report, read_report, report_json
from gpipe.schedule.action import Kind
from tests.support.plain_loop import one_thread
from tests.support.planned import pipe_by_costs
from tests.support.processes.digests import Digests, digests
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}
WIDTHS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
WIDE: dict[str, Any] = {**SIZES, **WIDTHS, "num_key_value_heads": 2, "max_position_embeddings": 64}
ROUTED: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SEED, IGNORED = 5, -100
Scope = Callable[[int], AbstractContextManager[None]]


def model_of(name: str, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    config: transformers.PretrainedConfig
    match name:
        case "gpt2":
            small: dict[str, Any] = {"vocab_size": 61, "n_head": 4, "n_layer": 4, "n_embd": 32, "n_positions": 64}
            drops: dict[str, Any] = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
            config = transformers.GPT2Config(**small, **drops, tie_word_embeddings=False)
        case "mixtral":
            config = transformers.MixtralConfig(**WIDE, **ROUTED, attention_dropout=dropout)
        case "qwen2":
            config = transformers.Qwen2Config(**WIDE, attention_dropout=dropout)
        case _:
            config = transformers.LlamaConfig(**WIDE, attention_dropout=dropout)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def batch_of(rows: int = 5, tokens: int = 14, seed: int = 1) -> dict[str, Tensor]:
    """Rows with padding on the left and on the right, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, 61, (rows, tokens), generator=generator)
    real = torch.ones(rows, tokens, dtype=torch.long)
    for row in range(rows):
        real[row, : row % 3] = 0
        real[row, tokens - row % 2 * 4 :] = 0
    return {"input_ids": words, "attention_mask": real, "labels": words.where(real.bool(), IGNORED)}


def piped(model: nn.Module, partitions: int, slices: int, micro_batches: int = 2, **how: object) -> gpipe.GPipe:
    settings: dict[str, Any] = {"micro_batches": micro_batches, "seed": SEED, **how}
    settings["schedule"] = gpipe.Sliced(settings.get("schedule", "gpipe"), slices)
    return pipe_by_costs(model, partitions, sample=batch_of(4, 11, seed=9), **settings)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loop_over_slices(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    slices: int,
    micro_batches: int = 2,
    scope: Scope = lambda number: nullcontext(),
) -> Tensor:
    """The loss of a mini-batch by transformers alone; its gradients are added to those of the model.

    Of a micro-batch slices go forward in order, each with a cache whose keys and values are cut off the graph of the
    slice before; then backward in reverse, each from its loss and from the keys and values that it left in the cache,
    with the gradients that the slices behind left there.
    """
    following = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    count = following.ne(IGNORED).sum()
    columns = [one.tensor_split(micro_batches) for one in (batch["input_ids"], batch["attention_mask"], following)]
    whole: Tensor | None = None
    for m, (words, real, labels) in enumerate(zip(*columns, strict=True)):
        ends = [part[-1].item() + 1 for part in torch.arange(words.shape[1]).tensor_split(slices)]
        cache = DynamicCache()
        losses: list[Tensor] = []
        left: list[list[Tensor]] = []  # in the cache by each slice, with its graph
        taken: list[list[Tensor]] = []  # from the cache by the slice behind, leaves
        for s, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            own = labels[:, first:end].contiguous()
            with scope(m * slices + s):
                output = model(
                    input_ids=words[:, first:end].contiguous(),
                    attention_mask=real[:, :end].contiguous(),
                    labels=own,
                    shift_labels=own,
                    num_items_in_batch=count,
                    past_key_values=cache,
                    use_cache=True,
                )
            losses.append(output.loss)
            whole = output.loss.detach() if whole is None else whole + output.loss.detach()
            layers: list[Any] = cache.layers
            left.append([one for layer in layers for one in (layer.keys, layer.values)])
            for layer in layers:
                layer.keys = layer.keys.detach().requires_grad_(layer.keys.requires_grad)
                layer.values = layer.values.detach().requires_grad_(layer.values.requires_grad)
            taken.append([one for layer in layers for one in (layer.keys, layer.values)])
        for loss, keys, leaves in reversed(list(zip(losses, left, taken, strict=True))):
            behind = [(key, leaf.grad) for key, leaf in zip(keys, leaves, strict=True) if leaf.grad is not None]
            torch.autograd.backward([loss, *(key for key, _ in behind)], [None, *(grad for _, grad in behind)])
    assert whole is not None
    return whole


def train_rank(rank: int, world: int, name: str, partitions: int, how: dict[str, Any]) -> tuple[float, Digests]:
    """The loss of a step, and the gradients that a rank has."""
    rows = 5 if world == partitions else 4
    batch = batch_of(rows)
    if world > partitions:  # replicas, each of which is given its own rows
        half = rank // partitions
        batch = {key: value.tensor_split(world // partitions)[half] for key, value in batch.items()}
    with piped(model_of(name), partitions, 3, driver="process", **how) as pipe:
        loss = pipe.step(batch)
        return loss.item(), digests(gradients_of(pipe))


FAMILIES = ("llama", "gpt2", "qwen2", "mixtral")
WAYS: dict[str, dict[str, Any]] = {
    "fill-drain": {},
    "fill-drain, two stages a rank": {"schedule": gpipe.Interleaved(2, "gpipe"), "remat": "never"},
    "Seq1F1B": {"schedule": "1f1b"},
    "Seq1F1B, lockstep": {"schedule": "1f1b", "remat": "except_last", "driver": "lockstep"},
    "Seq1F1B, one kept": {"schedule": "1f1b", "remat": 1},
}


def stepped(pipe: gpipe.GPipe, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = pipe.step(batch)
    found = gradients_of(pipe)
    pipe.zero_grad()
    return loss, found


def looped(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    with one_thread():
        loss = loop_over_slices(model, *args, **kwargs)
    found = gradients_of(model)
    model.zero_grad()
    return loss, found


def same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> bool:
    (loss, found), (theirs, expected) = one, other
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    return torch.equal(loss, theirs)


@pytest.mark.parametrize(
    ("name", "partitions", "way"),
    [
        *(("llama", 2, way) for way in WAYS),
        *((name, 2, way) for name in ("gpt2", "mixtral") for way in ("fill-drain", "Seq1F1B", "Seq1F1B, one kept")),
        *(("qwen2", partitions, "Seq1F1B") for partitions in (1, 3, 4)),
    ],
)
def test_slices_leave_the_bits_of_the_plain_loop_over_slices(name: str, partitions: int, way: str) -> None:
    model, how = model_of(name), WAYS[way]
    with piped(model, partitions, 3, **how) as pipe:
        for batch in (batch_of(), batch_of(4, 7, seed=2)):  # 14 and 7 tokens: slices of several lengths
            expected = looped(model, batch, 3)
            assert same(stepped(pipe, batch), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_slices_give_within_rounding_what_the_whole_gives(name: str) -> None:
    model, batch = model_of(name), batch_of()
    with piped(model, 2, 4) as pipe:
        loss, found = stepped(pipe, batch)
    whole = model(**batch).loss
    whole.backward()
    assert torch.isclose(loss, whole, rtol=1e-6)
    for key, gradient in gradients_of(model).items():
        assert torch.allclose(found[key], gradient, rtol=1e-4, atol=1e-7), key


def test_a_micro_batch_whose_last_slice_has_no_label_and_one_of_few_rows() -> None:
    model, batch = model_of("llama"), batch_of(3, 12)
    batch["labels"][:2, 4:] = -100  # all of the first micro-batch that the second and third slice have
    with piped(model, 2, 3, schedule="1f1b") as pipe:
        assert same(stepped(pipe, batch), looped(model, batch, 3))
        one = {name: value[:1] for name, value in batch_of(1, 12, seed=4).items()}
        assert same(stepped(pipe, one), looped(model, one, 3, micro_batches=1))


def test_dropout_is_keyed_by_slices_and_a_recompute_draws_again_what_it_drew() -> None:
    model, batch = model_of("gpt2", dropout=0.2), batch_of()
    with piped(model, 2, 3, schedule="1f1b") as pipe:
        found = stepped(pipe, batch)
    layers = gpipe.layers_of(model, batch_of(4, 11, seed=9))
    expected = looped(model, batch, 3, scope=lambda number: layers.rng_scope(SEED, 0, number))
    assert same(found, expected)


def test_evaluation_goes_in_slices_and_a_call_does_not() -> None:
    model, batch = model_of("llama"), batch_of()
    with piped(model, 2, 3) as pipe, one_thread(), torch.no_grad():
        loss = pipe.step(batch)
        whole = model(**batch).loss
        assert torch.isclose(loss, whole, rtol=1e-6)
        given = {key: value for key, value in batch.items() if key != "labels"}
        first = {key: value[:3] for key, value in given.items()}
        assert torch.equal(pipe(**given).logits[:3], model(**first).logits)


def test_frozen_layers_and_positions_of_ones_own() -> None:
    model, batch = model_of("llama"), batch_of(4, 12)
    inner: Any = model.model
    for block in (inner.embed_tokens, *inner.layers[:2]):
        block.requires_grad_(False)
    with piped(model, 2, 3, schedule="1f1b") as pipe:
        assert same(stepped(pipe, batch), looped(model, batch, 3))
        positions = torch.arange(12).expand(4, 12) + 3
        shifted = stepped(pipe, {**batch, "position_ids": positions})
    model(**batch, position_ids=positions).loss.backward()
    for key, gradient in gradients_of(model).items():
        assert torch.allclose(shifted[1][key], gradient, rtol=1e-4, atol=1e-7), key


def test_so_it_is_under_autocast() -> None:
    model, batch = model_of("llama"), batch_of()
    with piped(model, 2, 3, schedule="1f1b") as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            found = stepped(pipe, batch)
        cast = looped(model, batch, 3, scope=lambda number: torch.autocast("cpu", torch.bfloat16))
        assert same(found, cast)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_processes_leave_the_bits_of_one(schedule: str, pool: WorkerPool) -> None:
    model, batch = model_of("llama"), batch_of()
    loss, expected = looped(model, batch, 3)
    whole = digests(expected)
    ranks = answers(pool.run(train_rank, "llama", 2, {"schedule": schedule}, world=2))
    for theirs, found in ranks:
        assert theirs == loss.item()
        assert found.items() <= whole.items()
    assert {name for _, found in ranks for name in found} == whole.keys()


def test_replicas_have_one_loss(pool: WorkerPool) -> None:
    model, batch = model_of("llama"), batch_of(4)
    loss, _ = looped(model, batch, 3, micro_batches=4)
    ranks = answers(pool.run(train_rank, "llama", 2, {"schedule": "1f1b"}, world=4))
    assert [theirs for theirs, _ in ranks] == [pytest.approx(loss.item(), rel=1e-6)] * 4
    assert ranks[0][1] == ranks[2][1]
    assert ranks[1][1] == ranks[3][1]


def test_the_table_the_record_and_the_prediction_name_slices() -> None:
    model, batch = model_of("llama"), batch_of()
    with piped(model, 2, 4, schedule="1f1b") as pipe:
        recording = gpipe.record(pipe)
        pipe.step(batch)
        (timeline,) = recording.timelines
        done = [str(span.action) for span in timeline.spans if span.action.kind is Kind.FORWARD and not span.rank]
        assert done == [f"0F{m}.{s}" for m in range(2) for s in range(4)]
        assert pipe.program.micro_batches_text == "2 micro-batches of 4 slices"
        assert "M=2 micro-batches of S=4 slices" in pipe.summary()
        first = [str(span.action) for span in pipe.prediction.timeline.spans[:1]]
        assert first == ["0F0.0"]
        report = Report("slices", timelines=(timeline,))
        assert read_report(report_json(report)).timelines == (timeline,)


def test_an_error_names_the_slice() -> None:
    model = model_of("llama")
    layers: Any = model.get_submodule("model.layers")
    with piped(model, 2, 3, remat="never") as pipe:

        def fails(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            if len(seen) == 4:
                raise OverflowError("too much")
            seen.append(1)

        seen: list[int] = []
        handle = layers[3].register_forward_pre_hook(fails)
        with pytest.raises(OverflowError) as error:
            pipe.step(batch_of())
        handle.remove()
        assert "micro-batch 1.1" in error.value.__notes__[-1]
        pipe.zero_grad()
        batch = batch_of()
        assert same(stepped(pipe, batch), looped(model, batch, 3))


# Refusals.


def checkpointed() -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE))
    model.model.gradient_checkpointing = True  # as both methods that enable it, of which one is deprecated
    return model


def stretched() -> nn.Module:
    config = transformers.LlamaConfig(**WIDE)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return transformers.LlamaForCausalLM(config)


def encoder() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**WIDE))


def windowed() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**WIDE, sliding_window=16))


def mixing() -> nn.Module:
    small: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**small))


def balanced() -> nn.Module:
    model = model_of("mixtral")
    model.config.output_router_logits = True  # type: ignore[union-attr]  # of transformers
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (encoder, r"\[slices-(differ|need-cache)\]"),
        (windowed, r"16 tokens, .* 11 tokens.*\[slices-attention-window\]"),
        (mixing, r"\[slices-(differ|need-cache)\]"),
        (balanced, r"\[slices-router-loss\]"),
        (checkpointed, r"\[slices-gradient-checkpointing\]"),
        (stretched, r"\[slices-rotary-length\]"),
    ],
)
def test_what_cannot_be_cut_is_refused(build: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ValueError, match=rf"(?i)slices=3.*({said})"):
        piped(build(), 2, 3)


def test_a_window_is_proven_by_a_sample_that_is_longer() -> None:
    torch.manual_seed(3)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**WIDE, sliding_window=4))
    batch = batch_of()
    with piped(model, 2, 3, schedule="1f1b") as pipe:
        loss, found = stepped(pipe, batch)
        assert same((loss, found), looped(model, batch, 3))
    model(**batch).loss.backward()
    for key, gradient in gradients_of(model).items():
        assert torch.allclose(found[key], gradient, rtol=1e-4, atol=1e-7), key


def test_labels_predicted_from_padding_are_refused_and_padding_itself_may_be_otherwise() -> None:
    model = model_of("llama")
    model.set_attn_implementation("eager")  # type: ignore[operator]  # of transformers
    how: dict[str, Any] = {"schedule": gpipe.Sliced("gpipe", 3)}
    batch = batch_of()
    with pytest.raises(ValueError, match=r"\[slices-padding-labels\]"):
        pipe_by_costs(model, 2, 2, sample=batch, **how)
    behind = batch["attention_mask"].diff(dim=1, prepend=batch["attention_mask"][:, :1]) == 1
    batch["labels"][behind] = -100
    with pipe_by_costs(model, 2, 2, sample=batch, **how) as pipe:
        loss, found = stepped(pipe, batch)
    whole = model(**batch).loss
    whole.backward()
    assert torch.isclose(loss, whole, rtol=1e-6)
    for key, gradient in gradients_of(model).items():
        assert torch.allclose(found[key], gradient, rtol=1e-4, atol=1e-7), key


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"schedule": gpipe.Sliced("zb_h1", 3)}, "schedule='zb_h1' does not support slices"),
        ({"remat": "auto"}, "does not count the memory of slices"),
        ({"schedule": gpipe.Sliced("1f1b", 0)}, "slices=0\\. Use an integer"),
        ({"batch_norm": "deferred"}, "does not support batch_norm='deferred'"),
        ({"schedule": gpipe.Sliced("gpipe", 12)}, r"11 tokens.*\[slices-too-few-tokens\]"),
        ({"sample": {"input_ids": torch.ones(4, 6, dtype=torch.long)}}, r"\[slices-need-model-loss\]"),
        ({"sample": None}, "with sample="),
        (
            {"sample": {**batch_of(4, 11), "attention_mask": torch.zeros(4, 11)}},
            r"attention_mask .*\[slices-unknown-dimension\]",
        ),
        (
            {"sample": {**batch_of(4, 11), "attention_mask": gpipe.Whole(torch.zeros(11, 11))}},
            r"attention_mask .*\[slices-unknown-dimension\]",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(how: dict[str, Any], said: str) -> None:
    settings = {"micro_batches": 2, "schedule": gpipe.Sliced("gpipe", 3), "sample": batch_of(4, 11), **how}
    model: Any = model_of("llama")
    if how.get("sample", model) is None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=said):
        gpipe.GPipe(model, 2, **settings)


def test_what_a_step_cannot_be_given_is_refused() -> None:
    with piped(model_of("llama"), 2, 3) as pipe:
        batch = batch_of()
        with pytest.raises(ValueError, match=r"\[slices-need-model-loss\]"):
            pipe.step(batch, batch["labels"], lambda output, target: output.logits.sum())
        with pytest.raises(ValueError, match=r"attention_mask .*\[slices-unknown-dimension\]"):
            pipe.step({**batch, "attention_mask": torch.ones(5, 1, 14, 14)})
        packed = torch.arange(14).remainder(5).expand(5, 14)
        with pytest.raises(ValueError, match=r"\[slices-packed-rows\]"):
            pipe.step({**batch, "position_ids": packed, "attention_mask": None})
        with pytest.raises(ValueError, match=r"\[slices-router-loss\]"):
            pipe.step({**batch, "output_router_logits": True})
        with pytest.raises(ValueError, match=r"\[slices-too-few-tokens\]"):
            pipe.step(batch_of(4, 2))
