"""Jobs that train by transformers' Trainer, by itself in replicas of its own or through a pipe over processes."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from gpipe.integrations.trackers import GPipeCallback
from gpipe.integrations.transformers import GPipeSeq2SeqTrainer, GPipeTrainer
from tests.families.law import quiet
from tests.integrations.trained import (
    MODES,
    UNEQUAL,
    Events,
    Outcome,
    Repacked,
    filled,
    log_of,
    model_of,
    next_words,
    rows_of,
    spoilt,
    stacked,
    trainer_of,
)
from tests.support.jobs.training import Json
from tests.support.said import said

LOSSES = {"own": next_words, "spoilt": spoilt}


def made(rank: int, partitions: int, name: str, mode: str, folder: str, how: Json) -> Any:
    """A trainer, of no pipe where there are no partitions."""
    transformers.utils.logging.disable_progress_bar()
    make: Any = partial(GPipeTrainer, partitions=partitions, **how.pop("pipe", {})) if partitions else Trainer
    given: Json = {"compute_loss_func": LOSSES[how.pop("loss")]} if "loss" in how else {}
    if how.pop("packed", False):
        given = {"train_dataset": UNEQUAL, "data_collator": filled}
        make = partial(make, pack=True) if partitions else Repacked
    how = {**MODES[mode], "save_strategy": "steps", "save_steps": 1, **how}
    return trainer_of(make, model_of(name, mode), name, Path(folder), arguments=how, **given)


def train(
    rank: int, world: int, partitions: int, name: str, mode: str, folder: str, how: Json, resume: str | None = None
) -> Json:
    """Trains, and leaves checkpoints; tells the log."""
    with quiet():
        trainer = made(rank, partitions, name, mode, folder, how)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{folder}/end")
        predicted = trainer.predict(rows_of(name, 3)).predictions
        if partitions:
            trainer.pipe.close()
        parts = predicted if isinstance(predicted, tuple) else (predicted,)
        return [log_of(trainer), [part.tolist() for part in parts]]


def watch(rank: int, world: int, partitions: int, folder: str) -> Json:
    """Trains, with callbacks; tells what these saw, the rows of a step, and what pipes' own callback logged."""
    with quiet():
        trainer, events = made(rank, partitions, "llama", "plain", folder, {"save_strategy": "no"}), Events()
        trainer.add_callback(events)
        if partitions:
            trainer.add_callback(GPipeCallback(trainer))
        trainer.train()
        numbers = [one for one in trainer.state.log_history if "gpipe/steps" in one]
        shares = [sum(value for name, value in one.items() if name.startswith("gpipe/share/")) for one in numbers]
        seen, own = events.seen, [one for one in log_of(trainer) if "gpipe/steps" not in one]
        for one in numbers:  # it logs right behind a loss
            seen.remove(["on_log", one["step"], one["epoch"]])
        rows = trainer.get_total_train_batch_size(trainer.args)
        return [[seen, own, rows], [[one["step"], one["gpipe/steps"]] for one in numbers], shares]


def predict(rank: int, world: int, partitions: int, folder: str, first: bool) -> Json:
    """Trains a step, perhaps behind an evaluation and a prediction without labels; tells what these gave."""
    with quiet():
        trainer = made(rank, partitions, "llama", "plain", folder, {"max_steps": 1, "per_device_eval_batch_size": 2})
        trainer.data_collator = lambda rows: {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        rows = [{key: value for key, value in row.items() if key != "labels"} for row in rows_of("llama", 3)]
        found = [trainer.evaluate()["eval_loss"], trainer.predict(rows).predictions.tolist()] if first else []
        trainer.train()
        return [found, log_of(trainer)]


def generate(rank: int, world: int, partitions: int, folder: str) -> Json:
    """Trains a T5, which generates in evaluation; tells the words."""
    with quiet():
        make: Any = partial(GPipeSeq2SeqTrainer, partitions=partitions) if partitions else Seq2SeqTrainer
        args = Seq2SeqTrainingArguments(
            folder, predict_with_generate=True, generation_max_length=6, generation_num_beams=2, use_cpu=True,
            report_to=[], max_steps=1, gradient_accumulation_steps=2, per_device_train_batch_size=2,
            per_device_eval_batch_size=2, disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no",
        )  # fmt: skip
        trainer = make(model_of("t5"), args, stacked, rows_of("t5"), rows_of("t5", 5))
        trainer.train()
        predicted = trainer.predict(rows_of("t5", 5))
        return predicted.predictions.tolist()


def drop(rank: int, world: int, partitions: int, folder: str) -> Json:
    """Trains with dropout; tells the log."""
    with quiet():
        make: Any = partial(GPipeTrainer, partitions=partitions)
        trainer = trainer_of(make, model_of("gpt2", dropout=True), "gpt2", Path(folder))
        trainer.train()
        return log_of(trainer)


def best(rank: int, world: int, partitions: int, mode: str, folder: str) -> Json:
    """Takes the best checkpoint at the end, goes on from the first with what it has, and so takes the best again."""
    often = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    with quiet():
        trainer = made(
            rank, partitions, "llama", mode, folder, {"learning_rate": 1.0, "greater_is_better": True, **often}
        )
        trainer.train()
        found = [trainer.evaluate()["eval_loss"]]
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
        return [*found, trainer.evaluate()["eval_loss"], trainer.state.best_global_step]


def saved(told: Json, folder: Path) -> Outcome:
    """What a training told and saved: the weights in the end, the optimizer's state with the last step."""
    files = [*(folder / "end").glob("*.safetensors")]
    last = max(folder.glob("checkpoint-*"), key=lambda one: int(one.name.rpartition("-")[2]))
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)
    state = {f"{at} {name}": value for at, one in optimizer["state"].items() for name, value in one.items()}
    groups = {f"group of {at}": torch.tensor(one["params"]) for at, one in enumerate(optimizer["param_groups"])}
    return Outcome(
        told[0], {name: tensor for file in files for name, tensor in load_file(file).items()}, state | groups
    )


def refuse(rank: int, world: int, folder: str, partitions: int, how: Json) -> Json:
    """What a trainer says when it is made."""
    with quiet():
        return said(lambda: made(rank, partitions, "llama", "plain", folder, how))


def read_apart(rank: int, world: int, folder: str) -> Json:
    """What a training says whose processes read other rows each."""
    with quiet():
        trainer = made(rank, world, "llama", "plain", folder, {})
        trainer.train_dataset = rows_of("llama")[rank:]
        return said(trainer.train)


def gather_in_loss(rank: int, world: int, folder: str) -> Json:
    """What a training says whose loss gathers."""
    with quiet():
        trainer = made(rank, world, "llama", "plain", folder, {})

        def loss(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            return trainer.accelerator.gather(output.logits.mean()).mean()

        trainer.compute_loss_func = loss
        return said(trainer.train)
