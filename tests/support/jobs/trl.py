"""Jobs that train by trl's trainers, by themselves in replicas of their own or through a pipe over processes."""

import warnings
from collections.abc import Callable
from functools import partial
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

    from gpipe.integrations.trl import GPipeDPOTrainer, GPipeSFTTrainer

    datasets.disable_progress_bars()
    how = dict(how)
    piped, plain, config = {
        "sft": (GPipeSFTTrainer, trl.SFTTrainer, trl.SFTConfig),
        "dpo": (GPipeDPOTrainer, trl.DPOTrainer, trl.DPOConfig),
    }[kind]
    make: Any = partial(piped, partitions=partitions, **how.pop("pipe", {})) if partitions else plain
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if how.pop("lora", False):
        make = partial(make, peft_config=lora)
    family, reference = how.pop("family", "llama"), how.pop("reference", None)
    trained: Any = get_peft_model(model(family, 0), lora) if how.pop("adapted", False) else model(family, 0)
    if reference is not None:
        make = partial(make, ref_model=model(family, reference))
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
