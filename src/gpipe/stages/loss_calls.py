"""The calls of torch's losses in a forward, or in a loss of the user's: what each of them averages over.

A `loss_fn` that wraps a loss of torch is watched in its first call of a run, and micro-batches are weighed as that
loss averages. In the first run it is also tried on the halves of a micro-batch: what does not add up is told.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gpipe._torch.trees import tree_leaves
from gpipe.stages.buffers import untouched
from gpipe.stages.losses import IGNORED_LABELS, call_loss, holds_ignored_labels, sum_of_weights
from gpipe.stages.microbatch import Reduction, count_rows, loss_weights, split
from gpipe.stages.side_effects import note, read_by_called, values_differ
from gpipe.stages.tree import Tree, replace_tensors

OF_LABELS = ("cross_entropy", "nll_loss")
OF_ROWS = frozenset(
    {
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "soft_margin_loss",
        "multilabel_soft_margin_loss", "ctc_loss",
    }
)  # fmt: skip


class LossCall(NamedTuple):
    """A call of one of torch's losses in a forward."""

    name: str
    target: Tensor | None
    reduction: object
    ignored: object
    weight: Tensor | None


def read_loss_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossCall | None:
    """What a function of torch averages over, if it is a loss, by its name."""
    if name not in OF_LABELS and name not in OF_ROWS:
        return None
    try:
        given = inspect.signature(getattr(functional, name)).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    given.apply_defaults()
    named = given.arguments
    weight = named.get("weight")
    target = named.get("target")
    return LossCall(
        name,
        target.detach().clone() if isinstance(target, Tensor) else None,
        named.get("reduction", "mean"),
        named.get("ignore_index"),
        weight.detach() if isinstance(weight, Tensor) else None,
    )


class LossReader(TorchFunctionMode):
    """Notes the calls of torch's losses in what runs inside.

    >>> import torch
    >>> calls = []
    >>> with LossReader(calls):
    ...     loss = torch.nn.MSELoss()(torch.ones(2), torch.zeros(2))
    >>> [call.name for call in calls]
    ['mse_loss']
    """

    def __init__(self, calls: list[LossCall]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Sees a function of torch."""
        if (loss := read_loss_call(getattr(func, "__name__", ""), args, kwargs or {})) is not None:
            self.calls.append(loss)
        return func(*args, **(kwargs or {}))


def is_shifted(target: Tensor | None, labels: object) -> bool | None:
    """Whether a loss was given labels from the second on; None if these are not its labels.

    It may be given all of them several times, once for each word ahead that it looks for.

    >>> labels = torch.tensor([[1, 2, 3]])
    >>> is_shifted(torch.tensor([1, 2, 3]), labels), is_shifted(torch.tensor([2, 3]), labels)
    (False, True)
    """
    if target is None or not isinstance(labels, Tensor) or not labels.dim():
        return None
    if labels.is_floating_point() or target.is_floating_point():
        return False if labels.shape == target.shape and torch.equal(labels, target) else None
    if labels.numel() and not target.numel() % labels.numel():
        arranged = target.reshape(-1, *labels.shape)
        if torch.equal(arranged, labels.expand_as(arranged)):
            return False
        if labels.dim() > 1 and torch.equal(arranged[..., :-1], labels[..., 1:].expand_as(arranged[..., :-1])):
            return True
    elif labels.dim() > 1 and target.numel() == labels[..., 1:].numel():
        return True if torch.equal(target.reshape(labels[..., 1:].shape), labels[..., 1:]) else None
    return None


UNREAD = (
    "loss_fn calls {names} on labels of which some count for more or less than others, and it cannot be seen how "
    "they come of its target; micro-batches are weighed by their rows. Give step(..., reduction=...), a function of "
    "the target that gives what the labels of a micro-batch count"
)
APART = (
    "losses of micro-batches, taken for means over rows, do not make that of the mini-batch: of the halves of a "
    "micro-batch loss_fn would be {together:.6g}, and of the whole it is {whole:.6g}. {remedy}"
)
SUMS = "It sums over rows: give step(..., reduction='sum'), or have it end in .mean()"
WEIGHS = (
    "Give step(..., reduction=...), 'sum' or a function of the target that gives the weight of a micro-batch, or "
    "'mean' if the mean of the losses of micro-batches is what is meant"
)
HALVES, NEARLY = 2, 1e-2


def find_reduction_in_calls(calls: Sequence[LossCall], target: Tree) -> Reduction | None:
    """By what the micro-batches of a loss are weighed that called torch's losses on labels in its target.

    Labels that it was not given as they are, or that several calls average otherwise, give None.
    """
    found = [_reduction_of(call, target) for call in calls if _averages_labels(call)]
    if not found or any(one is None for one in found):
        return None
    first, *others = (one for one in found if one is not None)
    return first if all(other(target) == first(target) for other in others) else None


def _averages_labels(call: LossCall) -> bool:
    return call.name in OF_LABELS and call.reduction == "mean" and call.target is not None


def _reduction_of(call: LossCall, target: Tree) -> "Callable[[Tree], float] | None":
    for at, leaf in enumerate(tree_leaves(target)):
        shifted = is_shifted(call.target, leaf)
        if shifted is not None:
            return partial(_weight_of_labels, at=at, shifted=shifted, ignored=call.ignored, weight=call.weight)
    return None


def _weight_of_labels(target: Tree, *, at: int, shifted: bool, ignored: object, weight: Tensor | None) -> float:
    labels: Any = tree_leaves(target)[at]
    return float(sum_of_weights(labels[..., 1:] if shifted else labels, ignored, weight))  # type: ignore[arg-type]


def call_watched_loss(
    loss_fn: Callable[..., object],
    output: Tree,
    target: Tree,
    popped: Mapping[str, object],
    *,
    targets: Sequence[Tree],
    weigh: Callable[[Reduction], None],
    tell: Callable[[Sequence[str]], object],
    tries: bool,
) -> tuple[Tensor, object]:
    """The loss of a micro-batch, as `call_loss` gives it, which is the first of a run.

    Args:
        loss_fn: None of torch's own.
        output: Of the micro-batch.
        target: Likewise.
        popped: What the loss pops.
        targets: Of all micro-batches.
        weigh: Is told by what micro-batches are to be weighed.
        tell: Is told what is to be said of it.
        tries: Whether to call it on halves too.
    """
    calls: list[LossCall] = []
    kept = [replace_tensors(one, _copy) for one in (output, target)] if tries and not popped else None
    before = _state_of(loss_fn) if tries else None
    with LossReader(calls):
        loss, metrics = call_loss(loss_fn, output, target, popped)
    reduction = find_reduction_in_calls(calls, target)
    weigh(reduction or "mean")
    found = []
    if kept is not None and not values_differ(before, _state_of(loss_fn)):
        found = _find_apart(loss_fn, kept[0], kept[1], loss, reduction or "mean")
    tell(found or ([] if reduction else list(_find_unread(calls, target, targets))))
    return loss, metrics


def _find_unread(calls: Sequence[LossCall], target: Tree, targets: Sequence[Tree]) -> Iterator[str]:
    of_labels = [call for call in calls if call.name in OF_LABELS and call.target is not None]
    unread = [call.name for call in of_labels if call.weight is not None or _leaves_out(call, target, targets)]
    if unread:
        yield UNREAD.format(names=", ".join(dict.fromkeys(unread)))
    elif not calls and holds_ignored_labels(targets):
        yield IGNORED_LABELS


def _leaves_out(call: LossCall, target: Tree, targets: Sequence[Tree]) -> bool:
    """Whether a call ignores labels of some target, or was given fewer than one of its own has."""
    assert call.target is not None
    sizes = [leaf.numel() for leaf in _labels_in(target) if is_shifted(call.target, leaf) is None]
    ignores = any(bool((leaf == call.ignored).any()) for leaf in [call.target, *_labels_in(targets)])  # type: ignore[attr-defined]
    return ignores or max(sizes, default=0) > call.target.numel()


def _labels_in(target: Tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dtype == torch.int64]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _state_of(loss_fn: object) -> object:
    """What a loss reads, to be compared with later: a loss that writes is not tried."""
    return note([*read_by_called(loss_fn), ("self", getattr(loss_fn, "__self__", None))])


def _find_apart(
    loss_fn: Callable[..., object], output: Tree, target: Tree, loss: Tensor, reduction: Reduction
) -> list[str]:
    """Tells of a loss that its halves do not make."""
    modules = [value for _, value in (*read_by_called(loss_fn), ("", loss_fn)) if isinstance(value, nn.Module)]
    try:
        rows = count_rows(output)
        outputs, targets = split(output, rows, HALVES, "output"), split(target, rows, HALVES, "target")
        with torch.no_grad(), ExitStack() as stack:
            for module in modules:
                stack.enter_context(untouched(module))
            losses = [float(call_loss(loss_fn, o, t, {})[0]) for o, t in zip(outputs, targets, strict=True)]
        counts = [count_rows(half) for half in outputs]
        weights = loss_weights(reduction, counts, targets)
    except Exception:  # it takes no halves: there is nothing to compare
        return []
    together, whole = (
        sum(one * weight for one, weight in zip(losses, weights, strict=True) if weight),
        float(loss.detach()),
    )
    if not math.isfinite(whole) or _is_nearly(together, whole):
        return []
    return [APART.format(together=together, whole=whole, remedy=SUMS if _is_nearly(sum(losses), whole) else WEIGHS)]


def _is_nearly(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NEARLY, abs_tol=NEARLY**2)
