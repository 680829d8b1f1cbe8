"""Jobs that train by trl's trainers, by themselves in replicas of their own or through a pipe over processes."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer

from tests.families.law import quiet
from tests.integrations.trained import Outcome, model_of, outcome
from tests.support.jobs.training import Json
from tests.support.plain_loop import one_thread
from tests.support.said import said

WORDS = 64


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", *(f"w{at}" for at in range(2, WORDS))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def rows(kind: str, number: int = 11) -> Any:
    """A data set: texts of unequal lengths, or pairs of answers to a question."""
    from datasets import Dataset

    drawn = torch.Generator().manual_seed(5)

    def text(words: int) -> str:
        return " ".join(f"w{word}" for word in torch.randint(2, WORDS, (words,), generator=drawn).tolist())

    if kind == "sft":
        return Dataset.from_list([{"text": text(5 + at % 5)} for at in range(number)])
    if kind == "grpo":
        return Dataset.from_list([{"prompt": text(2 + at % 3), "word": 2 + at} for at in range(number)])
    parts = {"prompt": 3, "chosen": 4, "rejected": 3}
    return Dataset.from_list(
        [{name: text(words + at % words) + " " for name, words in parts.items()} for at in range(number)]
    )


def made(kind: str, partitions: int, folder: str, how: Json) -> Any:
    """A trainer, of no pipe where there are no partitions.

    `how` has arguments of its configuration, and "lora", "adapted" (before), "reference" (the seed of one), "family"
    and "pipe".
    """
    import datasets
    import trl

    from gpipe.integrations.trl import GPipeDPOTrainer, GPipeGRPOTrainer, GPipeSFTTrainer

    datasets.disable_progress_bars()
    how = dict(how)
    piped, plain, config = {
        "sft": (GPipeSFTTrainer, trl.SFTTrainer, trl.SFTConfig),
        "dpo": (GPipeDPOTrainer, trl.DPOTrainer, trl.DPOConfig),
        "grpo": (GPipeGRPOTrainer, trl.GRPOTrainer, trl.GRPOConfig),
    }[kind]
    make: Any = partial(piped, partitions=partitions, **how.pop("pipe", {})) if partitions else plain
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if how.pop("lora", False):
        make = partial(make, peft_config=lora)
    family, reference, tied = how.pop("family", "llama"), how.pop("reference", None), how.pop("tied", False)
    trained: Any = get_peft_model(model(family, 0), lora) if how.pop("adapted", False) else model(family, 0)
    if tied:
        trained.lm_head.weight = trained.model.embed_tokens.weight
    if kind == "grpo":
        make = partial(make, reward_funcs=how.pop("rewards", [few_words, near]))
        how = {"num_generations": 4, "max_completion_length": 6, **how}
        if reference is not None:  # trl loads the reference model from the path of the model
            path = f"{folder}-reference"
            other: Any = model(family, reference)
            other.save_pretrained(path)  # in the first process only
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            trained.config._name_or_path, trained.name_or_path = path, path
    elif reference is not None:
        make = partial(make, ref_model=model(family, reference))
    if how.pop("rollout", False):
        make = partial(make, rollout_func=lambda *_: {})
    given = {name: how.pop(name) for name in ("compute_metrics", "compute_loss_func", "peft_config") if name in how}
    args = config(
        folder,
        **{
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "num_train_epochs": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **how,
        },
    )
    given |= {"train_dataset": rows(kind), "eval_dataset": rows(kind, 5), "processing_class": tokenizer()}
    return make(model=trained, args=args, **given)


def few_words(completion_ids: Any, **_: Any) -> list[float]:
    """Rewards completions of few different words."""
    return [-float(len(set(ids))) for ids in completion_ids]


def near(completions: list[str], word: list[int], **how: Any) -> list[float | None]:
    """Rewards words near the row's word; not every completion. Logs a column and a metric."""
    found = [[int(one[1:]) for one in text.split() if one[0] == "w"] for text in completions]
    how["log_extra"]("words", [len(words) for words in found])
    how["log_metric"]("near", float(sum(map(len, found))))
    return [
        None if len(words) < 2 else -sum(abs(one - at) for one in words) / WORDS / len(words)
        for words, at in zip(found, word, strict=True)
    ]


def model(family: str, seed: int) -> nn.Module:
    found = model_of(family, vocab_size=WORDS, pad_token_id=0, eos_token_id=1)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return found


def quietly(do: Callable[[], Any]) -> Any:
    with quiet(), one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return do()


def trained(kind: str, partitions: int, folder: str, how: Json) -> tuple[Trainer, Outcome]:
    def train() -> tuple[Trainer, Outcome]:
        trainer = made(kind, partitions, folder, how)
        trainer.train()
        return trainer, outcome(trainer)

    found: tuple[Trainer, Outcome] = quietly(train)
    return found


def train(rank: int, world: int, kind: str, partitions: int, folder: str, how: Json) -> Json:
    """Trains; tells the log, and saves the model."""
    trainer, found = trained(kind, partitions, folder, how)
    trainer.save_model(folder)
    return found.log


def refuse(rank: int, world: int, folder: str, how: Json) -> Json:
    """What a trainer of GRPO with as many partitions as processes says when it is made."""
    return quietly(lambda: said(lambda: made("grpo", world, folder, how)))


def spoil(rank: int, world: int, folder: str) -> Json:
    """What a training says on each rank whose second rewards raise an error."""
    times = count()

    def reward(completions: Sequence[str], **_: Any) -> list[float]:
        if next(times):
            raise ValueError("no reward")
        return [0.0] * len(completions)

    trainer = quietly(lambda: made("grpo", world, folder, {"rewards": [reward], "eval_strategy": "no"}))
    return quietly(lambda: said(trainer.train))
