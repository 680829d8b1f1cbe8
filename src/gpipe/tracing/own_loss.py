"""The loss that a model gives itself, and how those of micro-batches make that of a mini-batch.

A loss that is divided by the labels that count is put together by these: `num_items_in_batch`, their number in the
whole mini-batch, goes into every micro-batch where the forward uses it, and the losses are added up, as transformers'
Trainer does over its gradient accumulation. Else each counts by its own number of them, or of rows.

On the sample it is tried whether the losses of its halves make its own. What a model returned for each micro-batch is
put together to what it returns for the mini-batch.
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
COUNT = "num_items_in_batch"  # the keyword by which a forward is told the labels that count in the whole mini-batch
NO_LABELS = "no label of the mini-batch counts (all are {ignored}): there is nothing to average; skip this mini-batch"
UNKNOWN = (
    "of the model's own loss it cannot be known how it averages, by the losses of torch that it calls ({seen}); "
    "micro-batches are weighed by rows. If it does otherwise, give step(inputs, targets, loss_fn, reduction=...)"
)
UNEVEN = (
    "the model's own loss: the rows of the micro-batches have different sizes, and the loss is not that of {seen} "
    "alone. gpipe weights the micro-batches by {by}. If it averages over something else, call step(inputs, targets, "
    "loss_fn, reduction=...)."
)


def takes_count(model: nn.Module) -> bool:
    """Whether a forward uses `COUNT`: it names the parameter, or hands it on to the loss function of transformers.

    Other forwards with `**kwargs` may do anything with a keyword that the user did not pass.
    """
    if takes(model.forward, COUNT, by_name=True):
        return True
    base: Any = getattr(model, "get_base_model", lambda: model)()  # without an adapter of peft
    is_handed_on = hasattr(type(base), "loss_function") and takes(model.forward, COUNT)
    return is_handed_on and takes(base.loss_function, COUNT)


@dataclass(frozen=True)
class OwnLoss:
    """How the losses that a model returns for micro-batches are averaged.

    Attributes:
        average: What a loss divides by, as a function of the inputs of the model.
        finding: What to report of it.
        uneven: What to report if the rows of some micro-batches are larger, or have more labels that are not ignored.
        is_certain: Whether the loss is the result of one of torch's losses, so that there is nothing to try.
    """

    average: LossAverage
    finding: str | None = None
    uneven: str | None = None
    is_certain: bool = False

    @classmethod
    def of(cls, calls: Sequence[LossCall], given: Tree, *, counts: bool) -> "OwnLoss":
        """Finds it in the losses of torch that a forward called.

        Args:
            calls: The calls.
            given: The inputs of the model.
            counts: Whether the forward used `num_items_in_batch`.
        """
        labels = [call._replace(reduction="mean") for call in calls if call.name in LABELS]
        sums = bool(calls) and all(call.reduction == "sum" for call in calls)
        is_certain = any(call.is_loss for call in calls)
        for some in ([call] for call in labels) if counts else [labels]:
            found = find_average(some, given, 0, ready_made=True)
            if found is not None:
                return cls(found if counts or not sums else replace(found, by="sum"), is_certain=is_certain or counts)
        if counts and isinstance(given, Mapping) and "labels" in given:
            names = [name for name in ("shift_labels", "labels") if name in given]
            return cls(LossAverage("labels", _leaf_of(given[names[0]], given), ignored=IGNORED))
        if sums:
            return cls(LossAverage("sum"), is_certain=is_certain)
        average = find_average(calls, given, count_rows(given), ready_made=True)
        seen = ", ".join(call.name for call in calls) or "none"
        if not calls or {call.name for call in calls} - ELEMENTS - ROWS:
            return cls(LossAverage(), UNKNOWN.format(seen=seen))
        if average is not None and is_certain:
            return cls(average, is_certain=True)
        average = average or LossAverage()
        return cls(average, uneven=UNEVEN.format(seen=seen, by=average.by))

    def count(self, part: Tree) -> float:
        """What the loss of a micro-batch divides by."""
        return float(count_rows(part)) if self.average.by in ("rows", "sum") else self.average.count(part)

    def find(self, parts: Sequence[Tree], counts: Sequence[float]) -> list[str]:
        """Returns what to report, for micro-batches whose losses divide by these numbers."""
        shares = {count / count_rows(part) for count, part in zip(counts, parts, strict=True)}
        shapes = {tuple(leaf.shape[1:] for leaf in tensors_in(part)) for part in parts}
        uneven = len(shares) > 1 or len(shapes) > 1
        return [found for found in (self.finding, self.uneven if uneven else None) if found is not None]

    def shares(self, counts: Sequence[float], total: float) -> list[float]:
        """Returns the weight of each micro-batch."""
        if self.average.by == "sum":
            return [1.0] * len(counts)
        if not total:
            raise ValueError(NO_LABELS.format(ignored=self.average.ignored))
        return [count / total for count in counts]


def _leaf_of(value: object, given: Tree) -> int:
    return next(at for at, leaf in enumerate(tree_leaves(given)) if leaf is value)


NOT_TOGETHER = (
    "the model's own loss is not put together of those of micro-batches: of the sample's halves it would be "
    "{together:.6g}, and of the sample it is {whole:.6g}. Each micro-batch has its own all the same, weighed as well "
    "as can be; for the mini-batch's give step(inputs, targets, loss_fn, reduction=...) with a loss of the output"
)

NOT_TRIED = (
    "in evaluation, the model did not run on the sample and its halves ({kind}: {error}): it was not tried whether "
    "losses of micro-batches make the mini-batch's; if not, give step(inputs, targets, loss_fn, reduction=...)"
)
ONE_ROW = (
    "the model's own loss: the sample has one row, so gpipe cannot try whether the losses of micro-batches make the "
    "loss of the mini-batch. Pass a sample with two rows or more."
)


Run: TypeAlias = Callable[[Sequence[Tree]], Iterable[Any]]  # gives the outputs of the sample and of its parts


def tried(
    average: OwnLoss,
    model: nn.Module,
    sample: Tree,
    *,
    counts: bool,
    last: Run | None = None,
    state: ReachableState | None = None,
) -> OwnLoss:
    """How the losses of micro-batches make that of the mini-batch, as those of the sample's halves show it.

    That is as was read in the forward; of a sum, which the forward may divide by something itself, by labels or rows
    where these fit instead. Where nothing fits, it has what is to be told of it. `counts` is whether the forward is
    told the labels of the mini-batch. `last` runs the last layer alone: what it tells in favour is believed, for
    anything else the whole model runs. They run in evaluation, without dropout.
    """
    if lacks_values(model) or not isinstance(sample, Mapping):
        return average
    if last is not None:
        # The last layer may take a different path for the halves. Then the whole model runs instead.
        with suppress(Exception), unchanged(model, state), torch.no_grad():
            model.train(False)
            found = _tried(average, model, sample, counts, last)
            if (found.finding, found.uneven) == (average.finding, average.uneven):
                return found
    with unchanged(model, state), torch.no_grad():
        model.train(False)
        return _tried(average, model, sample, counts)


def _tried(
    average: OwnLoss, model: nn.Module, sample: Mapping[str, Any], counts: bool, last: Run | None = None
) -> OwnLoss:
    """How the losses of the model make that of the sample, or those of its last layer, which may raise."""
    try:
        halves = split(sample, max(count_rows(sample), HALVES), HALVES, "sample")
    except ValueError:
        return average if average.is_certain else replace(average, finding=average.finding or ONE_ROW)
    parts = [sample, *halves]
    try:
        outputs = [arguments(model, part).call(model) for part in parts] if last is None else last(parts)
        found = list(map(loss_in, outputs))
    except Exception as error:
        if last is not None or lacks_memory(error):
            raise
        return replace(average, finding=average.finding or NOT_TRIED.format(kind=type(error).__name__, error=error))
    losses = [float(loss) for loss in found if loss is not None]
    if len(losses) < len(found):
        return average
    others: list[Literal["labels", "rows"]] = ["labels", "rows"] if average.average.by == "sum" and not counts else []
    halved = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    sums, near = [], 1e-2 if halved else 1e-4
    for one in (average, *(replace(average, average=replace(average.average, by=other)) for other in others)):
        some = [one.count(half) for half in halves]
        if not sum(some):  # no label of the sample counts
            return average
        shares = [1.0] * HALVES if counts else one.shares(some, sum(some))
        sums.append(sum(loss * share for loss, share in zip(losses[1:], shares, strict=True) if share))
        if math.isclose(sums[-1], losses[0], rel_tol=near, abs_tol=near):
            if one.average.by != "labels" or counts or not all(some):
                return one
            counted = tree_leaves(sample)[one.average.leaf]
            names = [name for name, value in sample.items() if value is counted or name == "labels"]
            labels = {name: sample[name].clone() for name in names}
            for tensor in labels.values():  # A mean over labels then depends on those of one half only.
                tensor[-(len(tensor) // HALVES) :] = one.average.ignored
            return replace(one, uneven=_tried(one, model, {**sample, **labels}, False, last).finding)
    return replace(average, finding=NOT_TOGETHER.format(together=sums[0], whole=losses[0]))


LOSS_IN_OUTPUT = (
    "output{path} is a loss, and gpipe does not know how it averages over micro-batches. Leave the labels out of the "
    "inputs to get the rest of the output, or call step(). [loss-in-output]"
)


def join(outputs: Sequence[Tree], rows: Sequence[int], shares: Sequence[float]) -> Tree:
    """The output of the mini-batch: rows behind one another, losses added up by their shares."""
    losses = [loss for loss in map(loss_in, outputs, rows) if loss is not None]
    if 1 < len(losses) == len(outputs):
        if len(shares) != len(losses):
            path = next(keystr(path) for path, leaf in tree_flatten_with_path(outputs[0])[0] if leaf is losses[0])
            raise TypeError(LOSS_IN_OUTPUT.format(path=path))
        said = [loss * share for loss, share in zip(losses, shares, strict=True) if share]  # of no weight, even NaN
        whole = sum(said[1:], start=said[0])
        outputs = [
            tree_map(lambda leaf, loss=loss: whole if leaf is loss else leaf, output)
            for output, loss in zip(outputs, losses, strict=True)
        ]
    return merge(outputs, rows)


def loss_in(output: Tree, rows: int = 0) -> Tensor | None:
    """The loss in what a model returned of so many rows, if there is one: one number may be that of a row."""
    try:
        loss = own_loss(output)
    except TypeError:
        return None
    is_named = isinstance(output, Mapping) or hasattr(output, "loss")
    return loss if is_named or loss.shape[:1] != (rows,) else None
