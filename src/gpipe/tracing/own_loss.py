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

from gpipe._torch.trees import keystr, tree_flatten_with_path, tree_map
from gpipe.stages.losses import HALVES, OF_LABELS, OF_ROWS, LossCall, is_shifted, own_loss, sum_of_weights
from gpipe.stages.microbatch import CANNOT_MERGE, count_rows, merge, split
from gpipe.stages.tree import Tree
from gpipe.tracing.meta_model import lacks_values
from gpipe.tracing.runs import arguments, lacks_memory, takes, unchanged

COUNT = "num_items_in_batch"  # the keyword by which a forward is told the labels that count in the whole mini-batch
NO_LABELS = "no label of the mini-batch counts (all are {ignored}): there is nothing to average; skip this mini-batch"
UNKNOWN = (
    "of the model's own loss it cannot be known how it averages, by the losses of torch that it calls ({seen}); "
    "micro-batches are weighed by rows. If it does otherwise, give step(inputs, targets, loss_fn, reduction=...)"
)


def takes_count(model: nn.Module) -> bool:
    """Whether a forward uses `COUNT`: it names the parameter, or hands it on to the loss function of transformers.

    Other forwards with `**kwargs` may do anything with a keyword that the user did not pass.
    """
    if takes(model.forward, COUNT, by_name=True):
        return True
    base: Any = getattr(model, "get_base_model", lambda: model)()  # without an adapter of peft
    loss_function = getattr(base, "_loss_function", None)  # set by the user
    if not hasattr(type(base), "loss_function") or not takes(model.forward, COUNT):
        return False
    return loss_function is None or takes(loss_function, COUNT)


@dataclass(frozen=True)
class LossAverage:
    """What the loss of a micro-batch is divided by: the labels that count, rows, or nothing, if losses are sums."""

    by: Literal["labels", "rows", "sum"] = "rows"
    labels: str = "labels"  # the name of the input that holds them
    shifted: bool = False  # whether the first label of each row is none, as where the next word is to be found
    ignored: object = -100  # the label that does not count
    weight: Tensor | None = None  # what labels of each class count; by default 1
    finding: str | None = None  # what is to be told of it
    uneven: str | None = None  # likewise, where not as many labels count in each micro-batch

    @classmethod
    def of(cls, calls: Sequence[LossCall], given: Mapping[str, Any], *, counts: bool) -> "LossAverage":
        """Finds it in the losses that a forward called; `counts` is whether it used the labels of the mini-batch."""
        of_labels = [call for call in calls if call.name in OF_LABELS and call.target is not None]
        for call in of_labels if len(of_labels) == 1 or counts else ():
            for name, labels in sorted(given.items(), key=lambda item: "label" not in item[0]):
                shifted = is_shifted(call.target, labels)
                if shifted is not None:
                    by: Literal["labels", "sum"] = "sum" if call.reduction == "sum" and not counts else "labels"
                    return cls(by, name, shifted, call.ignored, call.weight)
        if counts and "labels" in given:
            return cls("labels")
        if calls and all(call.reduction == "sum" for call in calls):
            return cls("sum")
        names = [call.name for call in calls]
        known = names and OF_ROWS.issuperset(names)
        return cls("rows", finding=None if known else UNKNOWN.format(seen=", ".join(names) or "none"))

    def count(self, part: Mapping[str, Any] | Tree) -> float:
        labels = part.get(self.labels) if isinstance(part, Mapping) else None
        if self.by != "labels" or not isinstance(labels, Tensor):
            return float(count_rows(part))
        if isinstance(part, Mapping) and isinstance(part.get("shift_labels"), Tensor):
            labels = part["shift_labels"]
        elif self.shifted:
            labels = labels[..., 1:]
        return float(sum_of_weights(labels, self.ignored, self.weight))  # type: ignore[arg-type]  # a number

    def find(self, parts: Sequence[Tree], counts: Sequence[float]) -> list[str]:
        """What is to be told of it, in micro-batches that count so much."""
        uneven = len({count / count_rows(part) for count, part in zip(counts, parts, strict=True)}) > 1
        return [found for found in (self.finding, self.uneven if uneven else None) if found is not None]

    def shares(self, counts: Sequence[float], total: float) -> list[float]:
        if self.by == "sum":
            return [1.0] * len(counts)
        if not total:
            raise ValueError(NO_LABELS.format(ignored=self.ignored))
        return [count / total for count in counts]


NOT_TOGETHER = (
    "the model's own loss is not put together of those of micro-batches: of the sample's halves it would be "
    "{together:.6g}, and of the sample it is {whole:.6g}. Each micro-batch has its own all the same, weighed as well "
    "as can be; for the mini-batch's give step(inputs, targets, loss_fn, reduction=...) with a loss of the output"
)

NOT_TRIED = (
    "in evaluation, the model did not run on the sample and its halves ({kind}: {error}): it was not tried whether "
    "losses of micro-batches make the mini-batch's; if not, give step(inputs, targets, loss_fn, reduction=...)"
)


Run: TypeAlias = Callable[[Sequence[Tree]], Iterable[Any]]  # gives the outputs of the sample and of its parts


def tried(
    average: LossAverage, model: nn.Module, sample: Tree, *, counts: bool, last: Run | None = None
) -> LossAverage:
    """How the losses of micro-batches make that of the mini-batch, as those of the sample's halves show it.

    That is as was read in the forward; of a sum, which the forward may divide by something itself, by labels or rows
    where these fit instead. Where nothing fits, it has what is to be told of it. `counts` is whether the forward is
    told the labels of the mini-batch. `last` runs the last layer alone: what it tells in favour is believed, for
    anything else the whole model runs. They run in evaluation, without dropout.
    """
    if lacks_values(model) or not isinstance(sample, Mapping):
        return average
    if last is not None:
        with suppress(Exception), unchanged(model), torch.no_grad():  # it may go another way: then the model tells
            model.train(False)
            found = _tried(average, model, sample, counts, last)
            if (found.finding, found.uneven) == (average.finding, None):
                return found
    with unchanged(model), torch.no_grad():
        model.train(False)
        return _tried(average, model, sample, counts)


def _tried(
    average: LossAverage, model: nn.Module, sample: Mapping[str, Any], counts: bool, last: Run | None = None
) -> LossAverage:
    """How the losses of the model make that of the sample, or those of its last layer, which may raise."""
    try:
        halves = split(sample, max(count_rows(sample), HALVES), HALVES, "sample")
    except ValueError:  # it has no rows, or one
        return average
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
    others: list[Literal["labels", "rows"]] = ["labels", "rows"] if average.by == "sum" and not counts else []
    halved = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    sums, near = [], 1e-2 if halved else 1e-4
    for one in (average, *(replace(average, by=other) for other in others)):
        some = [one.count(half) for half in halves]
        if not sum(some):  # no label of the sample counts
            return average
        shares = [1.0] * HALVES if counts else one.shares(some, sum(some))
        sums.append(sum(loss * share for loss, share in zip(losses[1:], shares, strict=True) if share))
        if math.isclose(sums[-1], losses[0], rel_tol=near, abs_tol=near):
            if one.by != "labels" or counts or not all(some):
                return one
            labels = {name: sample[name].clone() for name in (one.labels, "shift_labels") if name in sample}
            for tensor in labels.values():  # those of one half count alone: a mean over them does not feel the rest
                tensor[-(len(tensor) // HALVES) :] = one.ignored
            return replace(one, uneven=_tried(one, model, {**sample, **labels}, False, last).finding)
    return replace(average, finding=NOT_TOGETHER.format(together=sums[0], whole=losses[0]))


def join(outputs: Sequence[Tree], rows: Sequence[int], shares: Sequence[float]) -> Tree:
    """The output of the mini-batch: rows behind one another, losses added up by their shares."""
    losses = [loss for loss in map(loss_in, outputs, rows) if loss is not None]
    if 1 < len(losses) == len(outputs):
        if len(shares) != len(losses):
            path = next(keystr(path) for path, leaf in tree_flatten_with_path(outputs[0])[0] if leaf is losses[0])
            why = "is a loss, and it is not known how it averages (leave out the labels, for all but the loss)"
            raise TypeError(CANNOT_MERGE.format(path=path, why=why))
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
