"""The loss that a model gives itself, and how those of micro-batches make that of a mini-batch.

A loss that is divided by the labels that count is put together by these: `num_items_in_batch`, their number in the
whole mini-batch, goes into every micro-batch where the forward uses it, and the losses are added up, as transformers'
Trainer does over its gradient accumulation. Else each counts by its own number of them, or of rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gpipe.layers.losses import sum_of_weights
from gpipe.recording.loss_calls import OF_LABELS, OF_ROWS, LossCall
from gpipe.values.microbatch import count_rows
from gpipe.values.tree import Tree

COUNT = "num_items_in_batch"
"""The keyword by which a forward is told the labels that count in the whole mini-batch."""
NO_LOSS = (
    "step() was given neither targets nor loss_fn, so the loss is the model's own, and its output has none "
    "({found}): give what it makes a loss of (labels=...), or call step(inputs, targets, loss_fn)"
)
NO_LABELS = "no label of the mini-batch counts (all are {ignored}): there is nothing to average; skip this mini-batch"
UNKNOWN = (
    "of the model's own loss it cannot be known how it averages: {seen}; micro-batches are weighed by their rows. If "
    "it does otherwise, give step(inputs, targets, loss_fn, reduction=...)"
)


@dataclass(frozen=True)
class Counting:
    """What the loss of a micro-batch is divided by.

    Attributes:
        by: The labels that count, rows, or nothing: the losses are sums.
        labels: The name of the input that holds the labels.
        shifted: Whether the first label of each row is none, as where the next word is to be found.
        ignored: The label that does not count.
        weight: What labels of each class count; by default 1.
        finding: What is to be told of it.
    """

    by: Literal["labels", "rows", "sum"] = "rows"
    labels: str = "labels"
    shifted: bool = False
    ignored: object = -100
    weight: Tensor | None = None
    finding: str | None = None

    @classmethod
    def of(cls, calls: Sequence[LossCall], given: Mapping[str, Any], *, counts: bool) -> "Counting":
        """Finds it in the losses that a forward called.

        Args:
            calls: The calls.
            given: The arguments of the forward.
            counts: Whether it used the number of labels in the mini-batch.
        """
        of_labels = [call for call in calls if call.name in OF_LABELS and call.target is not None]
        for call in of_labels if len(of_labels) == 1 or counts else ():
            for name, labels in sorted(given.items(), key=lambda item: "label" not in item[0]):
                shifted = _is_shifted(call.target, labels) if isinstance(labels, Tensor) else None
                if shifted is not None:
                    by: Literal["labels", "sum"] = "sum" if call.reduction == "sum" and not counts else "labels"
                    return cls(by, name, shifted, call.ignored, call.weight)
        if counts and "labels" in given:
            return cls("labels")
        if calls and all(call.reduction == "sum" for call in calls):
            return cls("sum")
        known = calls and all(call.name in OF_ROWS for call in calls)
        return cls("rows", finding=None if known else UNKNOWN.format(seen=_in_words(calls)))

    def count(self, part: Mapping[str, Any] | Tree) -> float:
        """What a micro-batch counts."""
        labels = part.get(self.labels) if isinstance(part, Mapping) else None
        if self.by != "labels" or not isinstance(labels, Tensor):
            return float(count_rows(part))
        if isinstance(part, Mapping) and isinstance(part.get("shift_labels"), Tensor):
            labels = part["shift_labels"]
        elif self.shifted:
            labels = labels[..., 1:]
        return float(sum_of_weights(labels, self.ignored, self.weight))  # type: ignore[arg-type]  # a number

    def shares(self, counts: Sequence[float], total: float) -> list[float]:
        """The share of each micro-batch in the loss."""
        if self.by == "sum":
            return [1.0] * len(counts)
        if not total:
            raise ValueError(NO_LABELS.format(ignored=self.ignored))
        return [count / total for count in counts]


def _in_words(calls: Sequence[LossCall]) -> str:
    names = ", ".join(dict.fromkeys(call.name for call in calls))
    match len(calls):
        case 0:
            return "its forward calls none of torch's losses"
        case 1:
            return f"its forward calls {names}, of labels that are none of its inputs"
    return f"its forward calls {len(calls)} losses of torch ({names})"


def _is_shifted(target: Tensor | None, labels: Tensor) -> bool | None:
    """Whether a loss was given labels from the second on; None if these are not its labels.

    It may be given all of them several times, once for each word ahead that it looks for.
    """
    if target is None or labels.is_floating_point() or target.is_floating_point() or not labels.dim():
        return None
    if labels.numel() and not target.numel() % labels.numel():
        arranged = target.reshape(-1, *labels.shape)
        if torch.equal(arranged, labels.expand_as(arranged)):
            return False
        if labels.dim() > 1 and torch.equal(arranged[..., :-1], labels[..., 1:].expand_as(arranged[..., :-1])):
            return True
    elif labels.dim() > 1 and target.numel() == labels[..., 1:].numel():
        return True if torch.equal(target.reshape(labels[..., 1:].shape), labels[..., 1:]) else None
    return None


def own_loss(output: Tree, target: Tree = None) -> Tensor:
    """The loss in what a model returned: its `loss`, or the output itself, or the first of a tuple.

    Raises:
        TypeError: There is none.
    """
    found: Any = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, tuple) and output:
        found = output[0]
    if isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point():
        return found
    kind = f"it is a {type(output).__name__}" if found is output else f"its loss is {type(found).__name__}"
    raise TypeError(NO_LOSS.format(found=kind))
