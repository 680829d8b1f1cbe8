"""Trainings by transformers' Trainer, of which one through a pipe is to leave the same: log, weights, optimizer.

A training has two epochs of six batches, the last of one row: an epoch is a step of four batches and one of two.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

import gpipe
from tests.families.catalogue import batch, build, named
from tests.families.law import quiet
from tests.support.plain_loop import one_thread

ROWS, MICRO_BATCHES = 11, 4
LAST, MIDDLE = 4, 3  # optimizer steps: all of them, and those before an epoch has ended
CLOCKS = ("runtime", "per_second", "preparation_time", "step_time")

Make: TypeAlias = Callable[..., Trainer]


class Outcome(NamedTuple):
    """The results of a training."""

    log: list[dict[str, Any]]
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


ADAPTED: dict[str, Any] = {"mamba2": ["in_proj"], "mixtral": ["q_proj", "v_proj"]}
"""The modules that get adapters, where not all can: for those of experts peft keeps weights where threads meet."""

MODES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "lora": {},
    "bf16": {"bf16": True},
    "resumed": {"save_strategy": "steps", "save_steps": MIDDLE},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
}


def rows_of(name: str, rows: int = ROWS) -> list[dict[str, Tensor]]:
    """A data set: each row by itself."""
    given = batch(named(name), rows=rows)
    return [{key: value[at] for key, value in given.items()} for at in range(rows)]


def stacked(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A collator; words are cut where the longest row ends, so that batches have lengths of their own."""
    found = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    if "attention_mask" in found and found["attention_mask"].shape == found.get("labels", torch.ones(())).shape:
        length = int(found["attention_mask"].sum(1).max())
        found = {key: value[:, :length].contiguous() if value.dim() == 2 else value for key, value in found.items()}
    return found


def model_of(
    name: str, mode: str = "plain", *, tied: bool = False, dropout: bool = False, **config: Any
) -> nn.Module:
    """Returns a model of a family. Embeddings and output weights are separate unless they are tied."""
    family = named(name)
    config = config if tied else {"tie_word_embeddings": False, **config}
    family = replace(family, config={**family.config, **config})
    model = build(family, dropout=dropout)
    if mode == "lora":
        torch.manual_seed(1)
        adapted = ADAPTED.get(name, "all-linear")
        lora = LoraConfig(r=2, target_modules=adapted, init_lora_weights=False, lora_dropout=0.1 * dropout)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft tells of what it has settled
            model = get_peft_model(model, lora)
    return model


def trainer_of(make: Make, model: nn.Module, name: str, folder: Path, **how: Any) -> Trainer:
    """A Trainer, or one through a pipe: `how` has its arguments, and in `arguments` those for TrainingArguments."""
    arguments = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **how.pop("arguments", {}),
    }
    given = {"train_dataset": rows_of(name), "eval_dataset": rows_of(name, 5), "data_collator": stacked, **how}
    return make(model=model, args=TrainingArguments(str(folder), **arguments), **given)


def train(
    make: Make, name: str, folder: Path, mode: str = "plain", *, resume: bool | str = False, **how: Any
) -> Outcome:
    """Trains a family to the end; `model` of `how` has what `model_of` takes."""
    model = model_of(name, mode, **how.pop("model", {}))
    how["arguments"] = {**MODES[mode], **how.pop("arguments", {})}
    with quiet(), one_thread():
        trainer = trainer_of(make, model, name, folder, **how)
        trainer.train(resume_from_checkpoint=resume or None)
        return outcome(trainer)


WORDS = [int(length) for length in torch.randint(4, 12, (11,), generator=torch.Generator().manual_seed(3))]
UNEQUAL = [{"input_ids": list(range(5, 5 + words)), "labels": list(range(5, 5 + words))} for words in WORDS]


def filled(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A collator that pads to the longest row."""
    assert len(rows) < len(UNEQUAL)
    columns = {key: [torch.tensor(row[key]) for row in rows] for key in rows[0]}
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in columns["input_ids"]], batch_first=True)
    padded = {key: nn.utils.rnn.pad_sequence(value, batch_first=True) for key, value in columns.items()}
    return {"input_ids": padded["input_ids"], "attention_mask": mask, "labels": padded["labels"] - 100 * (mask == 0)}


class Repacked(Trainer):
    """Trains by itself on the batches that `gpipe.pack` makes of the rows of a step."""

    padded = True

    def get_train_dataloader(self) -> Any:
        loader: Any = super().get_train_dataloader()
        self.collate, loader.base_dataloader.collate_fn = loader.collate_fn, list
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        given = [next(epoch_iterator) for _ in range(num_batches)]
        rows = [row for one in given for row in one]
        groups = gpipe.pack([len(row["input_ids"]) for row in rows], num_batches, padded=self.padded)
        batches = [self.collate([rows[row] for row in group]) for group in groups]
        return super().get_batch_samples(iter(batches), num_batches, device)


class Flattened(Repacked):
    padded = False


def outcome(trainer: Trainer) -> Outcome:
    """Returns the results of a trainer."""
    assert trainer.optimizer is not None
    assert trainer.model is not None
    state = trainer.optimizer.state_dict()["state"]
    return Outcome(
        log_of(trainer),
        {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()},
        {f"{at} {name}": copy.deepcopy(value) for at, one in state.items() for name, value in one.items()},
    )


def log_of(trainer: Trainer) -> list[dict[str, Any]]:
    """Returns Trainer's log without times."""
    history = trainer.state.log_history
    return [{key: value for key, value in one.items() if not key.endswith(CLOCKS)} for one in history]


def next_words(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    scores, words = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return cross_entropy(scores, words)
    return cross_entropy(scores, words, reduction="sum") / num_items_in_batch


def spoilt(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """No number for one batch of each epoch."""
    loss = next_words(output, labels, num_items_in_batch)
    return loss * float("nan") if (labels[0] == rows_of("llama")[3]["labels"][: labels.shape[1]]).all() else loss


class Events(TrainerCallback):
    """Notes which events happen, at which step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, control, **how: self.seen.append([name, state.global_step, state.epoch])


def apart(found: Outcome, expected: Outcome, least: float = 0.0) -> float:
    """Returns the largest difference of two outcomes, relative to each tensor's largest value or `least`."""
    assert [one.keys() for one in found.log] == [one.keys() for one in expected.log]
    assert found.weights.keys() == expected.weights.keys()
    assert found.optimizer.keys() == expected.optimizer.keys()
    far = 0.0
    for one, other in zip(found.log, expected.log, strict=True):
        for key, value in one.items():
            if value != other[key] and not (math.isnan(value) and math.isnan(other[key])):
                gap = abs(value - other[key]) / abs(other[key])
                far = max(far, math.inf if math.isnan(gap) else gap)
    for tensors, others in ((found.weights, expected.weights), (found.optimizer, expected.optimizer)):
        for key, tensor in tensors.items():
            if not torch.allclose(tensor, others[key], rtol=0.0, atol=0.0, equal_nan=True):
                largest = max(float(others[key].double().abs().max()), least)
                gap = float((tensor.double() - others[key].double()).abs().max()) / largest
                far = max(far, math.inf if math.isnan(gap) else gap)
    return far
