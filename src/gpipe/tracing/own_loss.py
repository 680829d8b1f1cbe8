"""Averages the model's own losses over micro-batches, and joins the outputs of micro-batches.

If the forward uses `num_items_in_batch`, gpipe passes the number of labels in the whole mini-batch that are not
ignored. gpipe then adds up the losses, as transformers' Trainer does for gradient accumulation. Otherwise gpipe
weights each micro-batch by its number of labels that are not ignored, or by its rows.

When a pipe is created, gpipe splits the sample into two halves, and checks that their losses average to the loss of
the sample.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from gpipe._torch.trees import keystr, tree_flatten_with_path, tree_leaves, tree_map
from gpipe.batch.losses import ELEMENTS, LABELS, ROWS, LossAverage, LossCall, find_average, own_loss
from gpipe.batch.microbatch import IGNORED, count_rows, merge, split
from gpipe.stages.reachable_state import ReachableState
from gpipe.stages.tree import Tree, tensors_in
from gpipe.tracing.meta_model import lacks_values
from gpipe.tracing.runs import arguments, lacks_memory, takes, unchanged

HALVES = 2
COUNT = "num_items_in_batch"  # The keyword for the number of labels in the mini-batch that are not ignored.
NO_LABELS = (
    "labels: all labels of the mini-batch are {ignored}, so the loss has nothing to average. Skip this mini-batch. "
    "[all-labels-ignored]"
)
UNKNOWN = (
    "The model's own loss calls these torch losses: {calls}. These calls do not determine how the loss averages, "
    "so gpipe weights micro-batches by rows. For other weights, call step(inputs, targets, loss_fn, reduction=...). "
    "[model-loss-unknown]"
)
NO_CALLS = (
    "The model's own loss does not call a loss of torch, so gpipe cannot find out how it averages, and "
    "weights micro-batches by rows. For other weights, call step(inputs, targets, loss_fn, reduction=...). "
    "[model-loss-unknown]"
)
UNEVEN = (
    "The model's own loss is not only the result of {calls}, and the rows of the micro-batches have different sizes. "
    "gpipe weights the micro-batches by {by}. For other weights, call step(inputs, targets, loss_fn, reduction=...). "
    "[model-loss-ragged-rows]"
)


def takes_count(model: nn.Module) -> bool:
    """Whether a forward has the parameter `num_items_in_batch`, or passes it to transformers' loss function.

    gpipe does not pass this argument to other forwards with `**kwargs`, because they may use it differently.
    """
    if takes(model.forward, COUNT, by_name=True):
        return True
    base: Any = getattr(model, "get_base_model", lambda: model)()  # The model inside an adapter of peft.
    is_passed_on = hasattr(type(base), "loss_function") and takes(model.forward, COUNT)
    return is_passed_on and takes(base.loss_function, COUNT)


@dataclass(frozen=True)
class OwnLoss:
    """Averages the losses that a model returns for micro-batches.

    Attributes:
        average: The divisor of a loss, as a function of the inputs of the model.
        finding: A finding to report for every mini-batch, or None.
        uneven: A finding to report if micro-batches have rows of different lengths, or with different numbers of
            labels that are not ignored.
        is_certain: Whether the average is known to be correct, because the loss is the result of a torch loss.
    """

    average: LossAverage
    finding: str | None = None
    uneven: str | None = None
    is_certain: bool = False

    @classmethod
    def of(cls, calls: Sequence[LossCall], inputs: Tree, *, counts: bool) -> "OwnLoss":
        """Determines the average from the torch losses that a forward called.

        Args:
            calls: The calls of torch's losses.
            inputs: The inputs of the model.
            counts: Whether the forward uses `num_items_in_batch`.
        """
        labels = [call._replace(reduction="mean") for call in calls if call.name in LABELS]
        sums = bool(calls) and all(call.reduction == "sum" for call in calls)
        is_certain = any(call.is_loss for call in calls)
        for group in ([call] for call in labels) if counts else [labels]:
            average = find_average(group, inputs, 0, ready_made=True)
            if average is not None:
                average = average if counts or not sums else replace(average, by="sum")
                return cls(average, is_certain=is_certain or counts)
        if counts and isinstance(inputs, Mapping) and "labels" in inputs:
            name = "shift_labels" if "shift_labels" in inputs else "labels"
            return cls(LossAverage("labels", _leaf_of(inputs[name], inputs), ignored=IGNORED))
        if sums:
            return cls(LossAverage("sum"), is_certain=is_certain)
        average = find_average(calls, inputs, count_rows(inputs), ready_made=True)
        if not calls:
            return cls(LossAverage(), NO_CALLS)
        names = ", ".join(call.name for call in calls)
        if {call.name for call in calls} - ELEMENTS - ROWS:
            return cls(LossAverage(), UNKNOWN.format(calls=names))
        if average is not None and is_certain:
            return cls(average, is_certain=True)
        average = average or LossAverage()
        return cls(average, uneven=UNEVEN.format(calls=names, by=average.by))

    def count(self, part: Tree) -> float:
        """Returns the divisor of the loss of a micro-batch."""
        return float(count_rows(part)) if self.average.by in ("rows", "sum") else self.average.count(part)

    def find(self, parts: Sequence[Tree], counts: Sequence[float]) -> list[str]:
        """Returns the findings to report for micro-batches whose losses have these divisors."""
        shares = {count / count_rows(part) for count, part in zip(counts, parts, strict=True)}
        shapes = {tuple(leaf.shape[1:] for leaf in tensors_in(part)) for part in parts}
        uneven = len(shares) > 1 or len(shapes) > 1
        return [finding for finding in (self.finding, self.uneven if uneven else None) if finding is not None]

    def shares(self, counts: Sequence[float], total: float) -> list[float]:
        """Returns the weight of each micro-batch, from the divisor of its loss and the sum of all divisors."""
        if self.average.by == "sum":
            return [1.0] * len(counts)
        if not total:
            raise ValueError(NO_LABELS.format(ignored=self.average.ignored))
        return [count / total for count in counts]


def _leaf_of(value: object, inputs: Tree) -> int:
    return next(index for index, leaf in enumerate(tree_leaves(inputs)) if leaf is value)


NOT_ADDITIVE = (
    "The model's own loss of the sample is {whole:.6g}, but its halves average to {together:.6g}. gpipe trains on "
    "the losses of micro-batches. For the loss of the mini-batch, call step(inputs, targets, loss_fn, "
    "reduction=...). [model-loss-not-additive]"
)
NOT_CHECKED = (
    "The model raised {error} in evaluation, so gpipe did not check that losses of micro-batches add up. If these "
    "losses are not means over rows or labels, call step(inputs, targets, loss_fn, reduction=...). "
    "[evaluation-loss-not-checked]"
)
ONE_ROW = (
    "The sample has one row, so gpipe did not check that the model's own losses of micro-batches add up to the loss "
    "of the mini-batch. Pass a sample with two rows or more. [model-loss-one-row]"
)


RunLastLayer: TypeAlias = Callable[[Sequence[Tree]], Iterable[Any]]
"""Runs the last layer of a model, and returns its outputs for the sample and its parts."""


def check_average(
    average: OwnLoss,
    model: nn.Module,
    sample: Tree,
    *,
    counts: bool,
    last: RunLastLayer | None = None,
    state: ReachableState | None = None,
) -> OwnLoss:
    """Checks that the losses of the sample's halves average to the loss of the sample, in evaluation mode.

    If the forward calls a torch loss with `reduction="sum"`, it may divide the sum by the number of labels or rows
    itself. The result then averages by labels or by rows, whichever reproduces the loss of the sample.

    Args:
        average: The average that the calls of torch's losses suggest.
        model: The model.
        sample: The inputs of the model.
        counts: Whether the forward uses `num_items_in_batch`.
        last: A function that runs only the last layer. If this does not confirm the average, the whole model runs.
        state: The current state of the model, if it has been copied already.

    Returns:
        The average, with a finding if no average matches the loss of the sample.
    """
    if lacks_values(model) or not isinstance(sample, Mapping):
        return average
    if last is not None:
        # The last layer may take a different path for the halves. Then the whole model runs instead.
        with suppress(Exception), unchanged(model, state), torch.no_grad():
            model.train(False)
            checked = _check_average(average, model, sample, counts, last)
            if (checked.finding, checked.uneven) == (average.finding, average.uneven):
                return checked
    with unchanged(model, state), torch.no_grad():
        model.train(False)
        return _check_average(average, model, sample, counts)


def _check_average(
    average: OwnLoss, model: nn.Module, sample: Mapping[str, Any], counts: bool, last: RunLastLayer | None = None
) -> OwnLoss:
    """Checks the average by running the whole model, or only its last layer, which may raise any error."""
    try:
        halves = split(sample, max(count_rows(sample), HALVES), HALVES, "sample")
    except ValueError:
        return average if average.is_certain else replace(average, finding=average.finding or ONE_ROW)
    parts = [sample, *halves]
    try:
        outputs = [arguments(model, part).call(model) for part in parts] if last is None else last(parts)
        losses = [float(loss) for loss in map(loss_in, outputs) if loss is not None]
    except Exception as error:
        if last is not None or lacks_memory(error):
            raise
        text = NOT_CHECKED.format(error=f"{type(error).__name__}: {error}")
        return replace(average, finding=average.finding or text)
    if len(losses) < len(parts):
        return average
    others: list[Literal["labels", "rows"]] = ["labels", "rows"] if average.average.by == "sum" and not counts else []
    halved = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    sums, near = [], 1e-2 if halved else 1e-4
    candidates = [average, *(replace(average, average=replace(average.average, by=by)) for by in others)]
    for candidate in candidates:
        divisors = [candidate.count(half) for half in halves]
        if not sum(divisors):  # All labels of the sample are ignored.
            return average
        shares = [1.0] * HALVES if counts else candidate.shares(divisors, sum(divisors))
        sums.append(sum(loss * share for loss, share in zip(losses[1:], shares, strict=True) if share))
        if math.isclose(sums[-1], losses[0], rel_tol=near, abs_tol=near):
            if candidate.average.by != "labels" or counts or not all(divisors):
                return candidate
            counted = tree_leaves(sample)[candidate.average.leaf]
            names = [name for name, value in sample.items() if value is counted or name == "labels"]
            labels = {name: sample[name].clone() for name in names}
            for tensor in labels.values():  # A mean over labels then depends on the labels of one half only.
                tensor[-(len(tensor) // HALVES) :] = candidate.average.ignored
            uneven = _check_average(candidate, model, {**sample, **labels}, False, last).finding
            return replace(candidate, uneven=uneven)
    return replace(average, finding=NOT_ADDITIVE.format(together=sums[0], whole=losses[0]))


LOSS_IN_OUTPUT = (
    "output{path} is a loss, and gpipe does not know how it averages over micro-batches. Leave the labels out of the "
    "inputs to get the rest of the output, or call step(). [loss-in-output]"
)


def join(outputs: Sequence[Tree], rows: Sequence[int], shares: Sequence[float]) -> Tree:
    """Returns the output of the mini-batch: concatenated rows, and the weighted sum of the losses.

    Args:
        outputs: The outputs of the micro-batches.
        rows: The number of rows of each micro-batch.
        shares: The weight of each loss. Empty if gpipe does not know these weights.

    Raises:
        TypeError: If the outputs contain a loss, but `shares` is empty.
    """
    losses = [loss for loss in map(loss_in, outputs, rows) if loss is not None]
    if 1 < len(losses) == len(outputs):
        if len(shares) != len(losses):
            path = next(keystr(path) for path, leaf in tree_flatten_with_path(outputs[0])[0] if leaf is losses[0])
            raise TypeError(LOSS_IN_OUTPUT.format(path=path))
        # A loss with the weight 0 may be NaN.
        weighted = [loss * share for loss, share in zip(losses, shares, strict=True) if share]
        whole = sum(weighted[1:], start=weighted[0])
        outputs = [
            tree_map(lambda leaf, loss=loss: whole if leaf is loss else leaf, output)
            for output, loss in zip(outputs, losses, strict=True)
        ]
    return merge(outputs, rows)


def loss_in(output: Tree, rows: int = 0) -> Tensor | None:
    """Returns the loss in the output of a model, or None.

    An unnamed tensor with one element per row of the micro-batch is not a loss.
    """
    try:
        loss = own_loss(output)
    except TypeError:
        return None
    is_named = isinstance(output, Mapping) or hasattr(output, "loss")
    return loss if is_named or loss.shape[:1] != (rows,) else None
