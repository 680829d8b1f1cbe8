"""Trains for an epoch, and measures the accuracy on held-out images."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

import gpipe
from gpipe.datasets import Images

Loss = Callable[[Tensor, Tensor], Tensor]


def train_epoch(
    pipe: gpipe.GPipe,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Images],
    learning_rates: Sequence[float],
    loss_fn: Loss,
    after_step: Callable[[float], None] = lambda loss: None,
) -> None:
    """Takes a step for each mini-batch, and tells its loss to `after_step`."""
    pipe.train()
    for batch, learning_rate in zip(batches, learning_rates, strict=True):
        loss = pipe.step(batch.images, batch.classes, loss_fn)
        update(optimizer, learning_rate)
        after_step(loss.item())


def update(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Steps the optimizer, and drops the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def measure_accuracy(pipe: gpipe.GPipe, held_out: Images) -> float:
    """Returns the share of images that are classified rightly, from 0 to 1, by the pipeline in eval mode."""
    pipe.eval()
    logits = pipe(held_out.images, gather=True)
    right = int((logits.argmax(dim=1) == held_out.classes.to(logits.device)).sum())
    return right / len(held_out)
