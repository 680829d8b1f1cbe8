"""Calls losses, and finds how they average, by which the losses of micro-batches make that of the mini-batch.

Most divide by a number that grows with the rows. Losses of labels divide by the labels that count, each times the
weight of its class, so a micro-batch has a share in the mini-batch's loss as it has in these. A loss of torch says so
itself. One that wraps a loss of torch is watched in its first call of a run; in the first run it is also tried on
parts of a micro-batch: what does not add up is told.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from types import MethodType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gpipe._torch.modes import without_compiler
from gpipe._torch.trees import tree_leaves
from gpipe.stages.buffers import untouched
from gpipe.stages.microbatch import IGNORED, Reduction, count_rows, loss_weights, merge, split
from gpipe.stages.side_effects import note, read_by_called
from gpipe.stages.tree import Tree, copy_of, replace_tensors, tensors_in

T_co = TypeVar("T_co", covariant=True)


class LossModule(Protocol[T_co]):
    """A loss that is a module: its forward says what it gives, where the call of any module gives Any."""

    @property
    def forward(self) -> Callable[..., T_co]:
        """What a call runs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives the loss, or it and metrics."""


NO_METRICS = object()
OF_LABELS = ("cross_entropy", "nll_loss")
OF_ELEMENTS = {
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
    "binary_cross_entropy_with_logits", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss",
    "SoftMarginLoss", "BCEWithLogitsLoss",
}  # fmt: skip
"""What averages over all elements of its target: functions, and classes."""
OF_ROWS = OF_ELEMENTS | {
    "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "multilabel_soft_margin_loss", "ctc_loss"
}  # fmt: skip
PER_ROW = ("weight", "pos_weight", "var")  # what a loss of torch may hold for each row, or for each class

NO_GRADIENT = (
    "the loss needs no gradient: it depends on no parameter that requires one; "
    "return a loss computed from the output, or call step() under torch.no_grad()"
)
IGNORED_LABELS = (
    f"targets hold labels {IGNORED}, and loss_fn is none of torch's own, so it cannot be known whether it ignores "
    f"them; micro-batches are weighed by their rows. If it averages over the other labels, give "
    f"step(..., reduction=lambda target: (target != {IGNORED}).sum()), else reduction='mean'"
)
OF_SEVERAL_LENGTHS = (
    "ready-made micro-batches have targets of several lengths, and it cannot be seen how loss_fn averages over "
    "them; micro-batches are weighed by their rows. Give step(..., reduction='mean') if that is meant, or a function "
    "of the target that gives the weight of a micro-batch: of a mean over elements lambda target: target.numel()"
)
APART = (
    "losses of micro-batches, taken for means over rows or labels that count, do not make that of the mini-batch: of "
    "two halves loss_fn would be {together:.6g}, and of the whole it is {whole:.6g}. {remedy}"
)
SUMS = "It sums over rows: give step(..., reduction='sum'), or have it end in .mean()"
WEIGHS = (
    "Give step(..., reduction=...): 'mean' if the mean of the losses of micro-batches is what is meant, a function "
    "of the target that gives the weight of a micro-batch, or 'sum' with a loss_fn that divides by numbers of the "
    "whole mini-batch, handed over among the targets"
)
UNREAD = (
    "loss_fn calls {names} on labels of which some count for more or less than others, and it cannot be seen how "
    f"they come of its target; micro-batches are weighed by their rows. {WEIGHS}"
)
HALVES = 2
_nearly = partial(math.isclose, rel_tol=1e-2, abs_tol=1e-4)


class LossCall(NamedTuple):
    """A loss of torch, by the name of its function or class, and what it averages over; of a call also the target."""

    name: str
    reduction: object
    ignored: object
    weight: Tensor | None
    target: Tensor | None = None
    of_rows: Mapping[str, Tensor] = {}  # what may have a row for each of the target's

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> "LossCall":
        """Reads arguments by name, those that were not given among them."""
        reduction, weight, target = arguments.get("reduction"), arguments.get("weight"), arguments.get("target")
        average, reduce = arguments.get("size_average"), arguments.get("reduce")  # older, and they overrule it
        if average is not None or reduce is not None:
            reduction = "none" if reduce is False else "sum" if average is False else "mean"
        return cls(
            name,
            reduction,
            arguments.get("ignore_index"),
            weight.detach() if isinstance(weight, Tensor) else None,
            target.detach().clone() if isinstance(target, Tensor) else None,
            {key: value for key, value in arguments.items() if key in PER_ROW and isinstance(value, Tensor)},
        )


_signature = lru_cache(inspect.signature)


def read_loss_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossCall | None:
    """What a function of torch averages over, if it is a loss, by its name."""
    return _read_arguments(name, args, kwargs) if name in OF_LABELS or name in OF_ROWS else None


def _read_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossCall | None:
    try:
        given = _signature(getattr(functional, name)).bind(*args, **kwargs)
    except (TypeError, ValueError):  # calling it will raise
        return None
    given.apply_defaults()
    return LossCall.of(name, given.arguments)


def read_loss(loss_fn: object) -> LossCall | None:
    """A loss of torch, also in a `functools.partial`; None of what is not torch's, or does more than torch's."""
    keywords: dict[str, object] = {}
    if isinstance(loss_fn, partial) and not loss_fn.args:
        keywords, loss_fn = loss_fn.keywords, loss_fn.func
    if isinstance(loss_fn, MethodType) and loss_fn.__name__ in ("forward", "__call__", nn.Module.__call__.__name__):
        loss_fn = loss_fn.__self__
    function = without_compiler(loss_fn)
    if isinstance(function, nn.Module):
        kind = type(function)
        own = "forward" in vars(function) or kind.__call__ is not nn.Module.__call__
        if keywords or own or not is_loss_of_torch(function):
            return None
        name = next((base.__name__ for base in kind.__mro__ if base.__name__ in OF_ELEMENTS), "")
        return LossCall.of(name, {at: getattr(function, at, None) for at in ("reduction", "ignore_index", *PER_ROW)})
    name = getattr(function, "__name__", "")
    return _read_arguments(name, (None, None), keywords) if getattr(functional, name, None) is function else None


def is_loss_of_torch(module: nn.Module) -> bool:
    """Whether torch wrote a module's forward, as that of a loss."""
    return getattr(getattr(type(module), "forward", None), "__module__", "") == "torch.nn.modules.loss"


def find_contradiction(loss_fn: object, reduction: Reduction) -> list[str]:
    """Tells of a loss of torch that sums where its micro-batches are averaged, or the other way round."""
    loss = read_loss(loss_fn)
    if loss is None or (reduction, loss.reduction) not in (("mean", "sum"), ("sum", "mean")):
        return []
    return [
        f"loss_fn has reduction={loss.reduction!r} and step was given reduction={reduction!r}: losses of "
        f"micro-batches, each a {loss.reduction} over its rows, are put together by {reduction}; leave out step's "
        f"reduction= to have the loss's own"
    ]


def find_reduction(loss_fn: object, *, ready_made: bool = False) -> Reduction | None:
    """How a loss of torch.nn or torch.nn.functional averages, also in a `functools.partial`; None of any other."""
    loss = read_loss(loss_fn)
    if loss is None or loss.reduction is None:
        return None
    if loss.reduction == "none":
        raise ValueError(
            "loss_fn gives a loss for each row, by reduction='none', and step() needs one of each micro-batch: add "
            ".mean(), as in loss_fn=lambda output, target: loss(output, target).mean(), or leave reduction='none' out"
        )
    if loss.reduction == "sum":
        return "sum"
    if loss.ignored is not None:
        return partial(sum_of_weights, ignored=loss.ignored, weight=loss.weight)
    if ready_made and loss.name in OF_ELEMENTS:  # each may have another length, and a mean counts elements
        return lambda target: target.numel() if isinstance(target, Tensor) else 1.0
    return "mean"


def check_weights_of_rows(loss_fn: object, targets: Sequence[Tree], rows: Sequence[int]) -> None:
    """Checks that a loss of torch holds nothing that has a row for each of the mini-batch's."""
    target, loss = targets[0], read_loss(loss_fn) if len(rows) > 1 else None
    if loss is None or not isinstance(target, Tensor) or not target.is_floating_point():
        return
    for name, value in loss.of_rows.items():
        if value.dim() >= target.dim() and value.shape[0] == sum(rows):
            raise ValueError(
                f"{name} of loss_fn has shape {tuple(value.shape)}, a row for each of the mini-batch's {sum(rows)}, "
                f"and would meet micro-batches of {rows[0]}; hand it over among the targets, which are split: "
                f"step(inputs, (targets, {name}), lambda output, t: loss(output, t[0], {name}=t[1]))"
            )


def sum_of_weights(target: Tree, ignored: object, weight: object) -> object:
    """The labels that count, each times the weight of its class; of probabilities, the positions."""
    if not isinstance(target, Tensor):
        return 1.0  # the loss itself will say that it takes none
    if target.is_floating_point():  # of classes along the second dimension, or the only one
        return target.numel() / target.shape[1] if target.dim() > 1 else 1.0
    counts = None if ignored is None else target.ne(ignored)  # type: ignore[call-overload]  # a number
    if not isinstance(weight, Tensor):
        return target.numel() if counts is None else counts.sum()
    labels = target.long().clamp(0, len(weight) - 1)  # one that is out of range is the loss's to refuse
    found = weight.detach().double().to(target.device)[labels]
    return (found if counts is None else found.mul(counts)).sum()


def is_shifted(target: Tensor | None, labels: object) -> bool | None:
    """Whether a loss was given labels from the second on; None if these are not its labels."""
    if target is None or not isinstance(labels, Tensor) or not labels.dim():
        return None
    if labels.is_floating_point() or target.is_floating_point():
        return False if labels.shape == target.shape and torch.equal(labels, target) else None
    if labels.numel() and not target.numel() % labels.numel():
        times = target.reshape(-1, *labels.shape)  # all of them several times, once for each word ahead, say
        if (times == labels).all():
            return False
        return True if labels.dim() > 1 and (times[..., :-1] == labels[..., 1:]).all() else None
    words = labels[..., 1:]
    fits = labels.dim() > 1 and target.numel() == words.numel()
    return True if fits and (target.reshape(words.shape) == words).all() else None


def call_loss(
    loss_fn: Callable[..., object], output: Tree, target: Tree, popped: Mapping[str, object]
) -> tuple[Tensor, object]:
    """The loss of a micro-batch, and metrics or `NO_METRICS`; the function may work in place on what it is given."""
    # changes in place are counted apart from those of other micro-batches, which are views of one tensor
    target = replace_tensors(target, lambda tensor: tensor if tensor.requires_grad else tensor.data)
    loss = loss_fn(replace_tensors(output, _clone_of_leaf_view), target, **popped)
    metrics = NO_METRICS
    if isinstance(loss, tuple) and len(loss) == 2 and not hasattr(loss, "loss"):
        loss, metrics = loss
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss if loss.dim() == 0 else loss.reshape(()), metrics
    raise TypeError(
        f"loss_fn must return the micro-batch's loss, one real number, or (loss, metrics); it returned "
        f"{_found_and_remedy(loss)}"
    )


def _found_and_remedy(loss: object) -> str:
    if isinstance(loss, Tensor):
        found = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}"
        return f"{found}: add .mean()" if loss.numel() != 1 else f"{found}: give a floating-point loss"
    if isinstance(loss, (int, float)):
        return f"{loss!r}, a number that gradients cannot come from: return the tensor itself, without .item()"
    if loss is None:
        return "None: does its `return` lack?"
    if isinstance(loss, tuple) and not hasattr(loss, "loss"):
        return f"a tuple of {len(loss)}: put what is not the loss into one, (loss, (..., ...))"
    remedy = "return its .loss" if hasattr(loss, "loss") else "return the loss in it, or (loss, metrics)"
    return f"a {type(loss).__name__}: {remedy}"


def _clone_of_leaf_view(output: Tensor) -> Tensor:
    """An output for the loss to work on in place: one that a stage only passed on is a view of a leaf."""
    base = output._base
    return copy_of(output) if base is not None and base.is_leaf and base.requires_grad else output


def own_loss(output: Tree, target: Tree = None) -> Tensor:
    """The loss in what a model returned: its `loss`, or the output itself, or the first of a tuple."""
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
    raise TypeError(
        f"step() was given neither targets nor loss_fn, so the loss is the model's own, and its output has none "
        f"({kind}): give what it makes a loss of (labels=...), or call step(inputs, targets, loss_fn)"
    )


class LossReader(TorchFunctionMode):
    """Notes the calls of torch's losses in what runs inside."""

    def __init__(self, calls: list[LossCall]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (loss := read_loss_call(getattr(func, "__name__", ""), args, kwargs or {})) is not None:
            self.calls.append(loss)
        return func(*args, **(kwargs or {}))


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
    """The loss of the first micro-batch of a run, as `call_loss` gives it, where the loss is none of torch's own.

    `weigh` is told by what micro-batches are to be weighed, of which `targets` are those of all, and `tell` what is
    to be said of the loss. It is called on parts of the micro-batch too if it `tries`.
    """
    calls: list[LossCall] = []
    kept: Any = replace_tensors((output, target), lambda t: t.detach().clone()) if tries and not popped else None
    before = _state_of(loss_fn) if tries else None
    with LossReader(calls):
        loss, metrics = call_loss(loss_fn, output, target, popped)
    reduction = _find_reduction_in_calls(calls, target)
    weigh(reduction or "mean")
    unread = [] if reduction else _find_unread(calls, target, targets)
    lengths = {tuple(leaf.shape[1:]) for one in targets for leaf in tree_leaves(one)[:1] if isinstance(leaf, Tensor)}
    if tries and not reduction and not unread and len(lengths) > 1:
        tell([OF_SEVERAL_LENGTHS])
    of_rows = bool(unread and calls) and all(call.reduction == "none" for call in calls)  # so its rows say it
    if kept is not None and before == _state_of(loss_fn):
        apart = _find_apart(loss_fn, kept[0], [kept[1], *targets[1:]], reduction or "mean", by_rows=of_rows)
        unread = (unread if apart else []) if of_rows else apart or unread
    elif of_rows and not tries:  # it was tried in the first run
        unread = []
    tell(unread)
    return loss, metrics


def _find_reduction_in_calls(calls: Sequence[LossCall], target: Tree) -> Reduction | None:
    """What micro-batches weigh by labels of the target that torch's losses were called on, if all do so alike."""
    found = list[Callable[[Tree], float] | None]()
    for call in calls:
        if call.name in OF_LABELS and call.reduction == "mean" and call.target is not None:
            shifts = ((at, is_shifted(call.target, leaf)) for at, leaf in enumerate(tree_leaves(target)))
            read = (partial(_count_labels, call, at, shifted) for at, shifted in shifts if shifted is not None)
            found.append(next(read, None))
    return None if not found or None in found or len({one(target) for one in found if one}) > 1 else found[0]


def _count_labels(call: LossCall, at: int, shifted: bool, target: Tree) -> float:
    labels: Any = tree_leaves(target)[at]
    return float(sum_of_weights(labels[..., 1:] if shifted else labels, call.ignored, call.weight))  # type: ignore[arg-type]


def _find_unread(calls: Sequence[LossCall], target: Tree, targets: Sequence[Tree]) -> list[str]:
    """Tells of labels that count for more or less than others, in a loss of which it is not known how it averages."""
    everywhere = _labels_in(targets)
    unread = [
        call.name
        for call in calls
        if call.name in OF_LABELS and (given := call.target) is not None
        if call.weight is not None
        or any(bool(leaf.eq(call.ignored).any()) for leaf in [given, *everywhere])  # type: ignore[call-overload]  # a number
        or any(leaf.numel() > given.numel() and is_shifted(given, leaf) is None for leaf in _labels_in(target))
    ]
    if unread:
        return [UNREAD.format(names=", ".join(dict.fromkeys(unread)))]
    ignored = not calls and any(bool((leaf == IGNORED).any()) for leaf in everywhere)
    return [IGNORED_LABELS] if ignored else []


def _labels_in(target: Tree) -> list[Tensor]:
    return [leaf for leaf in tensors_in(target) if leaf.dtype in (torch.int64, torch.int32, torch.int16)]


def _state_of(loss_fn: object) -> object:
    """What a loss reads, to be compared with later: a loss that writes is not tried."""
    return note([*read_by_called(loss_fn), ("self", getattr(loss_fn, "__self__", None))])


def _find_apart(
    loss_fn: Callable[..., object], output: Tree, targets: Sequence[Tree], reduction: Reduction, *, by_rows: bool
) -> list[str]:
    """Tells of a loss that the halves of a micro-batch, or its rows, do not make; a single row is doubled."""
    modules = [value for _, value in (*read_by_called(loss_fn), ("", loss_fn)) if isinstance(value, nn.Module)]
    target, uneven = targets[0], False
    try:
        if (rows := count_rows(output)) == 1:
            rows, (output, target) = HALVES, [merge([value] * HALVES, [1] * HALVES) for value in (output, target)]
        if callable(reduction) and len({float(reduction(one)) / count_rows(one) for one in targets}) > 1:  # type: ignore[arg-type]
            with suppress(Exception):  # targets of several lengths, say
                target, uneven = _most_and_least(targets, reduction, rows), True
                first, second = split(output, rows, HALVES, "output")  # which are to differ
                second = replace_tensors(second, lambda leaf: leaf / HALVES if leaf.is_floating_point() else leaf)
                output = merge([first, second], [rows - rows // HALVES, rows // HALVES])
        parts = rows if by_rows else HALVES
        outputs, targets = split(output, rows, parts, "output"), split(target, rows, parts, "target")
        with torch.no_grad(), ExitStack() as stack:
            for module in modules:
                stack.enter_context(untouched(module))
            whole, *losses = (
                float(call_loss(loss_fn, o, t, {})[0])
                for o, t in zip([output, *outputs], [target, *targets], strict=True)
            )
        weights = loss_weights(reduction, [count_rows(part) for part in outputs], targets)
    except Exception:  # it takes no parts: there is nothing to compare
        return []
    together = sum(one * weight for one, weight in zip(losses, weights, strict=True) if weight)
    exact = uneven and all(leaf.dtype not in (torch.float16, torch.bfloat16) for leaf in tensors_in(output))
    if not math.isfinite(whole) or _nearly(together, whole, rel_tol=1e-4 if exact else 1e-2):
        return []
    return [APART.format(together=together, whole=whole, remedy=SUMS if _nearly(sum(losses), whole) else WEIGHS)]


def _most_and_least(targets: Sequence[Tree], weigh: Callable[[Tree], Any], rows: int) -> Tree:
    """So many rows of all targets: those that count most, then those that count least."""
    there = [replace_tensors(target, lambda leaf: leaf.to(tensors_in(targets[0])[0].device)) for target in targets]
    found = sorted((row for one in there for row in split(one, count_rows(one), count_rows(one), "")), key=weigh)
    return merge([*found[rows // HALVES - rows :], *found[: rows // HALVES]], [1] * rows)
