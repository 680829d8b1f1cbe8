"""Trains a small network to predict the next letter in Python's help texts, with Lightning through a pipe.

    python examples/lightning/classify.py

Nothing is downloaded: the texts are part of Python.
"""

from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gpipe.integrations.lightning import GPipeStrategy

LETTERS, BEFORE, WIDTH = 128, 8, 64


class NextLetter(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)]
        self.net = nn.Sequential(
            nn.Embedding(LETTERS, WIDTH), nn.Flatten(), nn.Linear(BEFORE * WIDTH, WIDTH), *blocks,
            nn.Linear(WIDTH, LETTERS),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        before, after = batch
        loss = cross_entropy(self.net(before), after)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        before, after = batch
        self.log("held_out", cross_entropy(self.net(before), after))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Tell(Callback):
    def on_train_epoch_end(self, trainer, module):
        for name in ("loss", "held_out"):
            print(f"epoch {trainer.current_epoch}, {name}: loss {trainer.callback_metrics[name]:.6f}")


seed_everything(0)
text = "".join(topics[name] for name in sorted(topics))[:20_000]
letters = torch.tensor([min(ord(letter), LETTERS - 1) for letter in text])
windows = letters.unfold(0, BEFORE + 1, 4)
data = TensorDataset(windows[:, :-1], windows[:, -1])
train, held_out = torch.utils.data.random_split(data, [0.9, 0.1])

trainer = Trainer(
    strategy=GPipeStrategy(partitions=2, schedule="1f1b"),
    accumulate_grad_batches=8,  # M, the micro-batches of a step
    max_epochs=4,
    gradient_clip_val=1.0,
    accelerator="cpu",
    callbacks=[Tell(), LearningRateMonitor(), ModelCheckpoint("next_letter", monitor="held_out")],
    enable_progress_bar=False,
)
trainer.fit(NextLetter(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=128))
