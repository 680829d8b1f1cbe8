"""Trains a small vision transformer to classify handwritten digits.

    python examples/trainer/classification.py

Nothing is downloaded: the images are part of scikit-learn, and the initial weights are random.
"""

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

set_seed(0)
digits = load_digits()
pictures = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
rows = [
    {"pixel_values": picture, "labels": int(label)} for picture, label in zip(pictures, digits.target, strict=True)
]

config = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=128, num_labels=10,
)  # fmt: skip
model = ViTForImageClassification(config)


def accuracy(predictions):
    """Returns the share of images that are classified correctly."""
    return {"accuracy": float((predictions.predictions.argmax(axis=1) == predictions.label_ids).mean())}


args = TrainingArguments(
    output_dir="classification",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_train_epochs=2,
    learning_rate=2e-3,
    logging_steps=10,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows[300:],
    eval_dataset=rows[:300],
    compute_metrics=accuracy,
)
trainer.train()
trainer.save_model()
for one in trainer.state.log_history:
    if "loss" in one:
        print(f"step {one['step']}: loss {one['loss']:.4f}")
print(f"held out: {trainer.evaluate()['eval_accuracy']:.0%} right")
