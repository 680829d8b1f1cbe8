"""Trains a small T5 to translate short texts of a web site from English to German.

    python examples/trainer/translation.py

Nothing is downloaded: the texts are part of Django, and the initial weights are random.
"""

from pathlib import Path

import django
import polib
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, set_seed

PADDING, END, LETTERS, LONGEST = 0, 1, 256, 40

set_seed(0)
file = polib.pofile(str(Path(django.__file__).parent / "conf" / "locale" / "de" / "LC_MESSAGES" / "django.po"))
pairs = [(entry.msgid, entry.msgstr) for entry in file if entry.msgstr]


def numbers(text: str) -> torch.Tensor:
    """Returns the letters of a text as token ids, with an end token."""
    return torch.tensor([min(ord(letter), LETTERS - 1) for letter in text[:LONGEST]] + [END])


def collate(rows):
    """Returns a batch, padded to its longest text."""
    words = [row["input_ids"] for row in rows]
    words = torch.nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=PADDING)
    labels = [row["labels"] for row in rows]
    labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": words, "attention_mask": (words != PADDING).long(), "labels": labels}


rows = [{"input_ids": numbers(english), "labels": numbers(german)} for english, german in pairs]
config = T5Config(
    vocab_size=LETTERS, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, dropout_rate=0.0,
    pad_token_id=PADDING, eos_token_id=END, decoder_start_token_id=PADDING,
)  # fmt: skip
model = T5ForConditionalGeneration(config)

args = Seq2SeqTrainingArguments(
    output_dir="translation",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    max_steps=40,
    learning_rate=3e-3,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
    predict_with_generate=True,
    generation_max_length=LONGEST,
)
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=rows[16:],
    eval_dataset=rows[:16],
    data_collator=collate,
)
trainer.train()
trainer.save_model()
for one in trainer.state.log_history:
    if "loss" in one:
        print(f"step {one['step']}: loss {one['loss']:.4f}")
print(f"held out: loss {trainer.evaluate()['eval_loss']:.4f}")
