"""Tests `GPipeTrainer` with the code that users of transformers' Trainer write."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import gpipe
from gpipe.integrations.transformers import TRAINING_STEP_OVERRIDDEN, GPipeSeq2SeqTrainer, GPipeTrainer, Pipelined
from gpipe.integrations.within_step import WithheldGradients
from tests.families.law import quiet
from tests.integrations.trained import (
    ADAPTED,
    LAST,
    MIDDLE,
    UNEQUAL,
    Events,
    Flattened,
    Repacked,
    apart,
    filled,
    log_of,
    model_of,
    next_words,
    outcome,
    rows_of,
    spoilt,
    stacked,
    train,
    trainer_of,
)
from tests.support.plain_loop import one_thread

TWO: Any = partial(GPipeTrainer, partitions=2)


def arguments(**how: Any) -> dict[str, Any]:
    return {"arguments": how}


ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "smoothed": ("llama", arguments(label_smoothing_factor=0.1)),
    "smoothed, of another task": ("bert", arguments(label_smoothing_factor=0.1)),
    "a loss of one's own": ("llama", {"compute_loss_func": next_words}),
    "a batch whose loss is no number": ("llama", {"compute_loss_func": spoilt, **arguments(max_grad_norm=0.0)}),
    "a loss that is not divided by labels": ("swin", {}),
    "clipped": ("llama", arguments(max_grad_norm=0.01)),
    "not clipped": ("llama", arguments(max_grad_norm=0.0)),
    "tokens": ("llama", arguments(include_num_input_tokens_seen="non_padding")),
    "by length": ("llama", arguments(train_sampling_strategy="group_by_length")),
    "last batches left out": ("llama", arguments(dataloader_drop_last=True)),
    "one batch a step": ("llama", arguments(gradient_accumulation_steps=1)),
    "another optimizer": ("llama", arguments(optim="sgd", lr_scheduler_type="cosine", warmup_steps=2)),
    "checkpointed": ("llama", arguments(activation_checkpointing=True)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_trainer_can_be_told_it_does_as_by_itself(name: str, tmp_path: Path) -> None:
    family, how = ALIKE[name]
    assert apart(train(TWO, family, tmp_path, **how), train(Trainer, family, tmp_path, **how)) == 0.0


WAYS: list[dict[str, Any]] = [
    {"schedule": "1f1b", "remat": "never"},
    {"schedule": "zb_v", "remat": 1},
    {"driver": "lockstep", "remat": "except_last"},
    {"partitions": [2, 2, 2]},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_however_the_pipe_runs(way: dict[str, Any], tmp_path: Path) -> None:
    assert apart(train(partial(TWO, **way), "llama", tmp_path), train(Trainer, "llama", tmp_path)) == 0.0


def test_a_plan_says_how(tmp_path: Path) -> None:
    batch = stacked(rows_of("llama", 8))
    with quiet():
        plan = gpipe.find_plan(model_of("llama"), batch, [gpipe.Device(flops=1e9)] * 2, schedule="1f1b")
    found = train(partial(GPipeTrainer, plan=plan), "llama", tmp_path)
    assert apart(found, train(Trainer, "llama", tmp_path)) == 0.0


@pytest.mark.parametrize("how", ["padded", "flattened", "workers", "resumed"])
def test_packed_it_trains_like_trainer_on_the_packed_batches(how: str, tmp_path: Path) -> None:
    joins = how == "flattened"
    kept: dict[str, Any] = {"dataloader_num_workers": 1} if how == "workers" else {}
    told: dict[str, Any] = {
        "train_dataset": UNEQUAL,
        "data_collator": DataCollatorWithFlattening() if joins else filled,
        "arguments": kept,
    }
    mode = "resumed" if how == "resumed" else "plain"
    packed = partial(TWO, pack=True)
    expected = train(Flattened if joins else Repacked, "llama", tmp_path / "alone", mode, **copy.deepcopy(told))
    found = train(packed, "llama", tmp_path / "packed", mode, **copy.deepcopy(told))
    assert apart(found, expected) == 0.0
    assert apart(train(TWO, "llama", tmp_path / "other", mode, **copy.deepcopy(told)), expected) > 0.0
    if how == "resumed":
        middle = str(tmp_path / "alone" / f"checkpoint-{MIDDLE}")
        resumed = [
            train(make, "llama", tmp_path / "on", mode, resume=middle, **copy.deepcopy(told))
            for make in (partial(packed, partitions=3), Repacked)
        ]
        assert apart(resumed[0], resumed[1]) == 0.0
        assert apart(resumed[0]._replace(log=[]), expected._replace(log=[])) == 0.0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(UNEQUAL * 4)


def test_rows_of_a_stream_are_packed_as_well(tmp_path: Path) -> None:
    def run(make: Any, folder: str, **how: Any) -> Any:
        given = {"train_dataset": Stream(), "data_collator": filled, **arguments(max_steps=3, **how)}
        return train(make, "llama", tmp_path / folder, **given)

    expected = run(Repacked, "alone", accelerator_config={"dispatch_batches": False})
    assert apart(run(partial(TWO, pack=True), "packed"), expected) == 0.0


@pytest.mark.parametrize(
    ("rows", "said"), [([{"pixels": torch.ones(2)}] * 8, "a row has \\['pixels'\\]"), ([(1, 2)] * 8, "type tuple")]
)
def test_rows_without_lengths_cannot_be_packed(rows: list[Any], said: str, tmp_path: Path) -> None:
    given = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.ones(2, 4, dtype=torch.int64)}
    made: Any = {"train_dataset": rows, "data_collator": lambda _: given}
    made["arguments"] = {"remove_unused_columns": False}
    with pytest.raises(ValueError, match=rf"pack=True needs the length of 'input_ids'.*{said}"):
        train(partial(TWO, pack=True), "llama", tmp_path, **made)


class OwnLoss:
    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        output = model(**inputs)
        loss = next_words(output, labels) + 0.01 * output.logits.square().mean()
        return (loss, output) if return_outputs else loss

    loss_is_scaled_for_ga = False


class ModelsLoss:
    """Returns the model's own loss without passing the number of labels, so that it is a mean."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(**inputs)
        return (output.loss, output) if return_outputs else output.loss


class OwnOptimizer:
    def create_optimizer(self: Any, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        return self.optimizer


@pytest.mark.parametrize("own", [OwnLoss, ModelsLoss, OwnOptimizer])
def test_what_a_subclass_does_in_its_own_way_is_done(own: type, tmp_path: Path) -> None:
    how = arguments(eval_strategy="epoch")
    plain, through_pipe = (type("Mine", (own, base), {}) for base in (Trainer, GPipeTrainer))
    found = train(partial(through_pipe, partitions=2), "llama", tmp_path, **how)
    assert apart(found, train(plain, "llama", tmp_path, **how)) == 0.0


def test_a_collator_that_draws_for_itself_has_drawn_nothing_for_the_sample(tmp_path: Path) -> None:
    class Masks:
        def __init__(self, model: nn.Module | None = None) -> None:
            self.generator, self.model = torch.Generator().manual_seed(3), model

        def __call__(self, rows: Any) -> Any:
            batch = stacked(rows)
            drawn = torch.rand(batch["labels"].shape, generator=self.generator) < 0.3
            return {**batch, "labels": batch["labels"].masked_fill(drawn, -100)}

    found = train(TWO, "llama", tmp_path, data_collator=Masks())
    assert apart(found, train(Trainer, "llama", tmp_path, data_collator=Masks())) == 0.0


def test_callbacks_see_the_same_events(tmp_path: Path) -> None:
    one, other = Events(), Events()
    train(TWO, "llama", tmp_path, callbacks=[one])
    train(Trainer, "llama", tmp_path, callbacks=[other])
    assert one.seen == other.seen
    assert sum(name == "on_substep_end" for name, *_ in one.seen) == 2 * (3 + 1)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("task", ["llama", "vit"])
def test_evaluation_and_prediction_before_training_leave_no_trace(task: str, precision: str, tmp_path: Path) -> None:
    def accuracy(predictions: Any) -> dict[str, float]:
        return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}

    def tried(make: Any) -> Any:
        how = {"compute_metrics": accuracy, **arguments(bf16=precision == "bf16", per_device_eval_batch_size=2)}
        trainer: Any = trainer_of(make, model_of(task), task, tmp_path, **how)
        trainer.data_collator = lambda rows: {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        unlabelled = [{key: value for key, value in row.items() if key != "labels"} for row in rows_of(task, 3)]
        seen = [trainer.evaluate(), trainer.predict(rows_of(task, 3)).predictions.tolist()]
        seen.append(trainer.predict(unlabelled).predictions.tolist())
        trainer.train()
        return seen[1:], log_of(trainer), outcome(trainer)

    with quiet(), one_thread():
        (*seen, found), (*expected, right) = tried(TWO), tried(Trainer)
    assert seen == expected
    assert apart(found, right) == 0.0


def test_what_is_saved_is_read_by_from_pretrained_and_the_best_is_taken(tmp_path: Path) -> None:
    how = arguments(
        eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1, learning_rate=0.3,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, save_total_limit=1,
    )  # fmt: skip
    with quiet(), one_thread():
        trainers: list[Any] = []
        for make in (TWO, Trainer):
            trainers.append(trainer_of(make, model_of("llama"), "llama", tmp_path / str(make is TWO), **how))
            trainers[-1].train()
        piped, plain = trainers
        piped.save_model(str(tmp_path / "saved"))
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert piped.state.best_global_step == plain.state.best_global_step < LAST
    assert apart(outcome(piped), outcome(plain)) == 0.0
    for name, tensor in piped.model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor)
    with torch.no_grad(), one_thread():
        words = rows_of("llama", 1)[0]["input_ids"][None]
        assert torch.equal(read.eval()(words).logits, piped.model.eval()(words).logits)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # asked for by peft
def test_adapters_are_saved_by_themselves_and_go_on(tmp_path: Path) -> None:
    train(TWO, "llama", tmp_path, "lora", arguments={"save_strategy": "steps", "save_steps": 2})
    saved = tmp_path / "checkpoint-2"
    assert (saved / "adapter_model.safetensors").exists()
    assert not (saved / "model.safetensors").exists()
    again = train(TWO, "llama", tmp_path, "lora", resume=str(saved))
    assert apart(again, train(Trainer, "llama", tmp_path, "lora", resume=str(saved))) == 0.0
    train(TWO, "llama", tmp_path, "lora", arguments={"save_strategy": "steps", "save_steps": LAST})
    read = PeftModel.from_pretrained(model_of("llama"), tmp_path / f"checkpoint-{LAST}").state_dict()
    learnt = {name: tensor for name, tensor in again.weights.items() if "lora" in name}
    assert learnt
    assert all(torch.equal(tensor, read[name]) for name, tensor in learnt.items())


def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    how: dict[str, Any] = {"model": {"dropout": True}, "arguments": {"save_strategy": "steps", "save_steps": 3}}
    whole = train(TWO, "gpt2", tmp_path, **how)
    three = partial(GPipeTrainer, partitions=3)
    resumed = train(three, "gpt2", tmp_path, resume=str(tmp_path / "checkpoint-3"), **how)
    assert resumed.weights.keys() == whole.weights.keys()
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in resumed.weights.items())
    assert resumed.log[:-1] == whole.log[:-1]  # behind it is what this part of the training took
    without = train(TWO, "gpt2", tmp_path)
    assert not all(torch.equal(tensor, whole.weights[name]) for name, tensor in without.weights.items())


def test_what_a_loss_draws_behind_the_models_call_is_the_same_for_every_k(tmp_path: Path) -> None:
    def noisy(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return next_words(output, labels) + nn.functional.dropout(output.logits, 0.5).square().mean()

    how = {"compute_loss_func": noisy, **arguments(neftune_noise_alpha=5.0)}
    two = train(TWO, "llama", tmp_path, **how)
    three = train(partial(GPipeTrainer, partitions=3, schedule="1f1b"), "llama", tmp_path, **how)
    assert apart(two, three) == 0.0


def test_several_gpus_of_one_process_are_not_given_copies(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, use_cpu=True, report_to=[])
    assert args.device.type == "cpu"
    args._n_gpu = 2  # as on a machine with two
    trainer = GPipeTrainer(model_of("llama"), args, stacked, rows_of("llama"), partitions=2)
    assert args.n_gpu == 1
    assert trainer.get_total_train_batch_size(args) == 2


def test_a_model_made_anew_gets_a_pipe_of_its_own(tmp_path: Path) -> None:
    def trained(make: Any) -> Any:
        trainer: Any = trainer_of(make, None, "llama", tmp_path, model_init=lambda: model_of("llama"))  # type: ignore[arg-type]
        trainer.train()
        first = getattr(trainer, "pipe", None)
        trainer.train()
        assert first is None or trainer.pipe is not first
        return outcome(trainer)

    with quiet(), one_thread():
        assert apart(trained(TWO), trained(Trainer)) == 0.0


def test_sequences_are_generated(tmp_path: Path) -> None:
    def made(make: Any) -> Any:
        args = Seq2SeqTrainingArguments(
            str(tmp_path), predict_with_generate=True, generation_max_length=6, use_cpu=True, report_to=[],
            num_train_epochs=1, gradient_accumulation_steps=2, per_device_train_batch_size=2, disable_tqdm=True,
            dataloader_pin_memory=False, save_strategy="no",
        )  # fmt: skip
        trainer = make(model_of("t5"), args, stacked, rows_of("t5"), rows_of("t5", 3))
        trainer.train()
        return trainer.predict(rows_of("t5", 3))

    with quiet(), one_thread():
        found, expected = made(partial(GPipeSeq2SeqTrainer, partitions=2)), made(Seq2SeqTrainer)
    assert found.predictions.tolist() == expected.predictions.tolist()
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=2e-6)


def test_a_smaller_batch_is_found_where_memory_is_short(tmp_path: Path) -> None:
    def short(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        if len(labels) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate much")
        return next_words(output, labels, num_items_in_batch)

    how = {"compute_loss_func": short, **arguments(auto_find_batch_size=True, per_device_train_batch_size=4)}
    found, expected = train(TWO, "llama", tmp_path, **how), train(Trainer, "llama", tmp_path, **how)
    assert apart(found, expected) == 0.0


def test_who_has_fewer_micro_batches_than_partitions_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how = arguments(gradient_accumulation_steps=1, max_steps=1)
    trainer_of(TWO, model_of("llama"), "llama", tmp_path, **how).train()
    assert "gradient_accumulation_steps=1 is less than partitions=2" in caplog.text


def piped(plain: Any, *, above: bool) -> Any:
    """Returns a pipelined class, whose overrides are called by the pipe or (`above`) call it."""
    return type("Piped", (plain, GPipeTrainer) if above else (Pipelined, plain), {})


class Counts(Trainer):
    """Decays weights by its own counter, and records each loss."""

    count = 0
    norms: tuple[float, ...] = ()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        self.count += 1
        self.inputs, self.mean = inputs, 0.5 * getattr(self, "mean", torch.ones(())) + 1
        found: Any = super().compute_loss(model, inputs, *args, **how)
        loss = found[0] if isinstance(found, tuple) else found
        self.norms = (*self.norms, float(loss.detach()))
        return loss * self.mean / self.count


class CountsSteps(Counts):
    """Does the same in an overridden training step."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) / self.steps
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("plain", [Counts, CountsSteps])
def test_what_a_loss_counts_is_counted_once_a_batch(plain: Any, tmp_path: Path) -> None:
    def trained(make: Any) -> Any:
        trainer: Any = trainer_of(make, model_of("llama"), "llama", tmp_path)
        trainer.train()
        return (trainer.count, trainer.norms, float(trainer.mean)), outcome(trainer)

    with quiet(), one_thread():
        (counted, found), (expected, right) = (
            trained(partial(piped(plain, above=False), partitions=2)),
            trained(plain),
        )
    assert counted == expected
    assert counted[0] == len(counted[1]) == 12
    assert apart(found, right) == 0.0


# What is refused.


class Draws(GPipeTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        mask = torch.rand(inputs["input_ids"].shape).round().long()
        return super().compute_loss(model, {**inputs, "attention_mask": mask}, *args, **how)


class CallsTwice(GPipeTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        return sum(super(CallsTwice, self).compute_loss(model, dict(inputs), *args, **how) for _ in range(2))


class CallsNever(GPipeTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        return torch.zeros((), requires_grad=True)


class PassesBy(GPipeTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss: Any = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class AddsUp(GPipeTrainer):
    words: Tensor

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.words = torch.zeros(())

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        self.words.add_(inputs["labels"].numel())
        return super().compute_loss(model, inputs, *args, **how)


class Lists(GPipeTrainer):
    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.seen: dict[str, list[int]] = {"train": []}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        self.seen["train"].append(1)
        return super().compute_loss(model, inputs, *args, **how)


class _Steps(Trainer):
    """A training step of one's own, as classes that are pipelined have it."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss: Any = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.backwards(loss)
        return loss.detach()

    def backwards(self, loss: Tensor) -> None:
        raise NotImplementedError


class _Skips(_Steps):
    def backwards(self, loss: Tensor) -> None:
        pass


class _Backwards(_Steps):
    def backwards(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)
        self.accelerator.backward(loss)


class _Clips(Trainer):
    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)  # type: ignore[union-attr]
        return loss


class _Reads(Trainer):
    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)
        self.model.get_input_embeddings().weight.grad.sign()  # type: ignore[union-attr, operator]
        return loss


class _Forgets(Trainer):
    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)
        self.model.zero_grad()  # type: ignore[union-attr]
        return loss


class _Clamps(Trainer):
    def training_step(self, *args: Any) -> Any:
        with torch.no_grad():
            for weight in self.model.parameters():  # type: ignore[union-attr]
                weight.clamp_(-1, 1)
        return super().training_step(*args)


class _Penalizes(Trainer):
    def compute_loss(self, *args: Any, **how: Any) -> Any:
        weights = self.model.parameters()  # type: ignore[union-attr]
        loss: Any = super().compute_loss(*args, **how)
        return loss + sum(weight.square().sum() for weight in weights)


class _Mixes(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        mixed = model.get_input_embeddings()(inputs["input_ids"])
        return model(inputs_embeds=mixed, labels=inputs["labels"]).loss


class _CallsAPart(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        return model.model(inputs["input_ids"]).last_hidden_state.sum()


OF_STEPS: dict[Any, str] = {
    _Skips: "[backward-not-called-once]",
    _Backwards: "[backward-not-called-once]",
    _Clips: "[gradients-used-in-step]",
    _Reads: "[gradients-used-in-step]",
    _Forgets: "[gradients-used-in-step]",
    _Clamps: "[weights-changed-in-step]",
    _Penalizes: "[compute-loss-uses-weights]",
    _Mixes: "[compute-loss-uses-weights]",
    _CallsAPart: "[model-not-called]",
}


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("plain", OF_STEPS)
def test_steps_that_a_pipe_cannot_follow_are_refused(plain: Any, above: bool, tmp_path: Path) -> None:
    said = (
        TRAINING_STEP_OVERRIDDEN if above and issubclass(plain, _Steps) and plain is not _Skips else OF_STEPS[plain]
    )
    if above and plain is _Skips:
        pytest.skip("it neither calls the pipe nor tells it of a loss")
    with quiet(), pytest.raises((ValueError, RuntimeError)) as raised:
        train(partial(piped(plain, above=above), partitions=2), "llama", tmp_path)
    assert said in "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


@pytest.mark.parametrize(
    ("family", "words", "block"),
    [
        ("llama", "model.embed_tokens", "model.layers.0.mlp"),
        ("albert", "albert.embeddings.word_embeddings", "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"),
    ],
)
def test_ranks_are_at_work_while_a_loss_withholds_gradients(
    family: str, words: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From within the second forward of the first rank into its third."""
    computed, inside, withheld, over, checked = (Event() for _ in range(5))
    began = [0, 0, 0]  # from the first step on, the thread of each forward of the first rank

    class Arms(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **how: Any) -> None:
            if state.global_step == 0:
                began.clear()

    class Holds(Trainer):
        def compute_loss(self, *args: Any, **how: Any) -> Any:
            loss = super().compute_loss(*args, **how)
            computed.set()
            assert inside.wait(60)
            return loss

        def training_step(self, *args: Any) -> Any:
            loss = super().training_step(*args)
            withheld.set()
            assert over.wait(60)
            return loss

    def begin(*_: Any) -> None:
        began.append(get_ident())
        if len(began) == 2:  # those that share a block with the last rank take turns at it
            computed.wait(60)
        if len(began) == 3:
            over.set()
            checked.wait(60)

    def wait(*_: Any) -> None:
        if began == [get_ident()] * 2:
            inside.set()
            withheld.wait(60)

    restore = WithheldGradients.restore

    def has_checked(held: WithheldGradients) -> None:
        restore(held)
        checked.set()

    monkeypatch.setattr(WithheldGradients, "restore", has_checked)
    model = model_of(family)
    model.get_submodule(words).register_forward_hook(begin)
    model.get_submodule(block).register_forward_hook(wait)
    make = partial(piped(Holds, above=False), partitions=2, remat="never")
    with quiet(), one_thread():
        found = trainer_of(make, model, family, tmp_path, callbacks=[Arms()])
        found.train()
    assert over.is_set()
    assert apart(outcome(found), train(partial(TWO, remat="never"), family, tmp_path)) == 0.0


class _Shrinks(TrainerCallback):
    def on_substep_end(self, *args: Any, model: Any = None, **how: Any) -> None:
        with torch.no_grad():
            model.lm_head.weight.mul_(0.9)


class _Looks(TrainerCallback):
    def on_substep_end(self, *args: Any, model: Any = None, **how: Any) -> None:
        model.lm_head.weight.grad.norm()


class _Ends(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **how: Any) -> None:
        control.should_epoch_stop = True


@pytest.mark.parametrize(
    ("callback", "said"),
    [(_Shrinks, "weights-changed-in-step"), (_Looks, "gradients-used-in-step"), (_Ends, "epoch-ended-in-step")],
)
def test_what_callbacks_do_between_batches_of_a_step_is_refused(callback: Any, said: str, tmp_path: Path) -> None:
    model = model_of("llama")
    trainer = trainer_of(TWO, model, "llama", tmp_path, callbacks=[callback()])
    with quiet(), pytest.raises(ValueError, match=said):
        trainer.train()
    assert all(type(weight.grad) is Tensor for weight in model.parameters())


def test_a_training_that_ends_between_batches_of_a_step_withholds_nothing(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **how: Any) -> None:
            control.should_training_stop = state.global_step == 1

    with quiet(), one_thread():
        found = trainer_of(TWO, model_of("llama"), "llama", tmp_path, callbacks=[Stops()])
        right = trainer_of(Trainer, model_of("llama"), "llama", tmp_path, callbacks=[Stops()])
        for trainer in (found, right):
            trainer.train()
            assert trainer.model is not None
            assert all(type(weight.grad) is Tensor for weight in trainer.model.parameters())
    assert apart(outcome(found), outcome(right)) == 0.0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (PassesBy, r"\[training-step-overridden\]"),
        (Draws, r"\[compute-loss-not-repeatable\]"),
        (AddsUp, r"self\.words .*\[compute-loss-changes-state\]"),
        (Lists, r"self\.seen .*\[compute-loss-changes-state\]"),
        (CallsTwice, r"\[model-called-twice\]"),
        (CallsNever, r"\[model-not-called\]"),
    ],
)
def test_losses_that_a_pipe_cannot_follow_are_refused(make: Any, said: str, tmp_path: Path) -> None:
    with quiet(), pytest.raises(ValueError, match=said):
        train(partial(make, partitions=2), "llama", tmp_path)


def compiled(model: nn.Module) -> nn.Module:
    model.hf_device_map = {"model": 0, "lm_head": 1}  # type: ignore[assignment]
    return model


WRONG: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]] = {
    "model= is a DataParallel": (nn.DataParallel, {}),
    "device_map or tp_plan": (compiled, {}),
    "torch_compile= is set": (lambda model: model, {"torch_compile": True}),
    "optim=.*(?i:lomo).* steps inside": (lambda model: model, {"optim": "lomo"}),
}


@pytest.mark.filterwarnings("ignore")  # torch_compile warns of CPUs
@pytest.mark.parametrize("said", WRONG)
def test_arguments_that_cannot_be_had_with_a_pipe_are_refused(said: str, tmp_path: Path) -> None:
    change, how = WRONG[said]
    with pytest.raises(ValueError, match=said):
        trainer_of(TWO, change(model_of("llama")), "llama", tmp_path, arguments=how)


def test_adapters_of_experts_are_refused_in_threads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTED, "mixtral", "all-linear")
    with quiet(), pytest.raises(ValueError, match=r"\[adapters-on-experts\]"):
        train(TWO, "mixtral", tmp_path, "lora")
    found = train(partial(TWO, driver="lockstep"), "mixtral", tmp_path, "lora")
    assert apart(found, train(Trainer, "mixtral", tmp_path, "lora")) == 0.0


def test_arguments_that_cannot_be_had_are_refused_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"micro_batches= .*\nmesh= "):
        trainer_of(partial(TWO, micro_batches=4, mesh=object()), model_of("llama"), "llama", tmp_path)
    with pytest.raises(TypeError, match=r"schedule=Sliced.*\npack='yes' is not a bool. Pass True or False."):
        trainer_of(partial(TWO, pack="yes", schedule=gpipe.Sliced("1f1b", 2)), model_of("llama"), "llama", tmp_path)
