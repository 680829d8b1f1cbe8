"""Trains a small Llama to write Python's help texts, letter by letter.

    python examples/trainer/causal_lm.py

Nothing is downloaded: the texts are part of Python, and the initial weights are random.
"""

from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

LENGTH, LETTERS = 64, 128

set_seed(0)
text = "".join(topics[name] for name in sorted(topics))[:50_000]
letters = torch.tensor([min(ord(letter), LETTERS - 1) for letter in text])
rows = [{"input_ids": row, "labels": row} for row in letters.split(LENGTH) if len(row) == LENGTH]

config = LlamaConfig(
    vocab_size=LETTERS, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
)  # fmt: skip
model = LlamaForCausalLM(config)

args = TrainingArguments(
    output_dir="causal_lm",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    max_steps=40,
    learning_rate=3e-3,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=20,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows[32:],
    eval_dataset=rows[:32],
)
trainer.train()
trainer.save_model()
for one in trainer.state.log_history:
    if "loss" in one:
        print(f"step {one['step']}: loss {one['loss']:.4f}")
print(f"held out: loss {trainer.evaluate()['eval_loss']:.4f}")
