"""Tries on the sample whether the losses of micro-batches make that of the mini-batch."""

import math
from collections.abc import Mapping, Sequence
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
    """How the losses of micro-batches make that of the mini-batch, as those of the sample's halves show it.

    That is as was read in the forward, or by labels or rows where these fit instead; where nothing fits, with what is
    to be told of it. `counts` is whether the forward is told the labels of the mini-batch. Dropout is left out of it.
    """
    if lacks_values(model) or not isinstance(sample, Mapping):
        return counting
    try:
        halves = split(sample, count_rows(sample), TWO, "sample")
        with in_mode(model, training=False), torch.no_grad():
            whole, *losses = (_loss(model, part) for part in (sample, *halves))
        found = {other: _together(other, halves, losses, counts=counts) for other in _others(counting, counts=counts)}
    except Exception:  # no loss, or none for so few rows: there is nothing to compare
        return counting
    for other, together in found.items():
        if math.isclose(together, whole, rel_tol=NEARLY, abs_tol=NEARLY):
            return other
    return replace(counting, finding=NOT_TOGETHER.format(together=found[counting], whole=whole))


def _others(counting: Counting, *, counts: bool) -> list[Counting]:
    """What was read, and what else it may be: a sum that the forward divides by something itself."""
    if counts or counting.by != "sum":
        return [counting]
    return [counting, replace(counting, by="labels"), replace(counting, by="rows")]


def _together(counting: Counting, halves: Sequence[Tree], losses: Sequence[float], *, counts: bool) -> float:
    some = [counting.count(half) for half in halves]
    shares = [1.0] * TWO if counts else counting.shares(some, sum(some))
    return sum(loss * share for loss, share in zip(losses, shares, strict=True) if share)


def _loss(model: nn.Module, part: Tree) -> float:
    given = arguments(model, part)
    return float(own_loss(model(*given.args, **given.kwargs)))
