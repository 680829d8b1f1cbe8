"""Tries on the sample whether the losses of micro-batches make that of the mini-batch."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from gpipe.recording.arguments import arguments
from gpipe.recording.runs import in_mode
from gpipe.replay.dry import lacks_values
from gpipe.splitting.own_loss import Counting, own_loss
from gpipe.values.microbatch import count_rows, split
from gpipe.values.tree import Tree

TWO, NEARLY = 2, 1e-3
NOT_TOGETHER = (
    "the model's own loss is not put together of those of micro-batches: of the sample's halves it would be "
    "{together:.6g}, and of the sample it is {whole:.6g}. Each micro-batch has its own loss all the same, weighed as "
    "well as can be; for that of the whole mini-batch give step(inputs, targets, loss_fn, reduction=...) with a loss "
    "of the model's output"
)


def tried(counting: Counting, model: nn.Module, sample: Tree, *, counts: bool) -> Counting:
    """The same, with what is to be told if the losses of the sample's halves do not make that of the sample.

    `counts` is whether the forward is told the labels of the mini-batch. Dropout is left out of it.
    """
    if lacks_values(model) or not isinstance(sample, Mapping):
        return counting
    try:
        halves = split(sample, count_rows(sample), TWO, "sample")
        with in_mode(model, training=False), torch.no_grad():
            whole, *losses = (_loss(model, part) for part in (sample, *halves))
        some = [counting.count(half) for half in halves]
        shares = [1.0] * TWO if counts else counting.shares(some, sum(some))
    except Exception:  # no loss, or none for so few rows: there is nothing to compare
        return counting
    together = sum(loss * share for loss, share in zip(losses, shares, strict=True) if share)
    if math.isclose(together, whole, rel_tol=NEARLY, abs_tol=NEARLY):
        return counting
    return replace(counting, finding=NOT_TOGETHER.format(together=together, whole=whole))


def _loss(model: nn.Module, part: Tree) -> float:
    given = arguments(model, part)
    return float(own_loss(model(*given.args, **given.kwargs)))
