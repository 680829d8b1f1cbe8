"""Calls losses, and decides what the micro-batches of a run count for in the loss of the mini-batch.

Most losses are means, and the number that a mean divides by is what a micro-batch counts for: its rows, the elements
of its target, or the labels that are not ignored, each times the weight of its class. `find_average` decides it from
the calls of torch's losses: a loss of torch that is passed to `step`, calls inside the user's loss function, which
`LossReader` observes, and calls inside a model. `gpipe.features.loss_check` compares the result with the mini-batch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from types import MethodType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe._torch.modes import OwnMode, without_compiler
from gpipe._torch.trees import tree_leaves
from gpipe.batch.microbatch import IGNORED, Reduction
from gpipe.stages.invalid_layers import is_loss_of_torch
from gpipe.stages.tree import Tree, replace_tensors

T_co = TypeVar("T_co", covariant=True)


class LossModule(Protocol[T_co]):
    """A loss that is a module: its forward says what it gives, where the call of any module gives Any."""

    @property
    def forward(self) -> Callable[..., T_co]:
        """What a call runs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives the loss, or it and metrics."""


NO_METRICS = object()
LABELS = frozenset({"cross_entropy", "nll_loss", "linear_cross_entropy"})
"""The losses of torch whose mean is over the labels that are not ignored."""
ELEMENTS = frozenset({
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss", "hinge_embedding_loss",
    "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss",
    "soft_margin_loss",
})  # fmt: skip
"""Those whose mean is over all elements."""
ROWS = frozenset({
    "cosine_embedding_loss", "ctc_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
    "triplet_margin_loss", "triplet_margin_with_distance_loss",
})  # fmt: skip
"""Those whose mean is over rows, however many elements a row has."""
WEIGHTED = ("mse_loss", "l1_loss")  # divide by the sum of their `weight`, if it is passed
PER_ROW = ("weight", "pos_weight", "var")  # what a loss of torch may hold for each row, or for each class

NO_GRADIENT = (
    "the loss needs no gradient: it depends on no parameter that requires one; "
    "return a loss computed from the output, or call step() under torch.no_grad()"
)


class LossCall(NamedTuple):
    """A loss of torch: its name, its reduction, and what its mean divides by."""

    name: str
    reduction: str | None
    ignored: object = None
    weight: Tensor | None = None  # of each class
    labels: Tensor | None = None  # the targets of a loss in LABELS
    divisor: float | None = None  # of the mean of any other loss
    is_loss: bool = False  # whether the loss function returned the result of this call
    of_rows: Mapping[str, Tensor] = {}  # arguments that may have a row for each row of the target

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> "LossCall":
        """Reads the arguments of a loss, by name, with their defaults."""
        reduction, weight, target = arguments.get("reduction"), arguments.get("weight"), arguments.get("target")
        ignored = arguments.get("ignore_index")
        average, reduce = arguments.get("size_average"), arguments.get("reduce")  # deprecated, and take precedence
        if average is not None or reduce is not None:
            reduction = "none" if reduce is False else "sum" if average is False else "mean"
        return cls(
            name,
            reduction,
            IGNORED if ignored is None and name in LABELS else ignored,
            weight.detach() if isinstance(weight, Tensor) else None,
            target.detach().clone() if isinstance(target, Tensor) and name in LABELS else None,
            _divisor(name, reduction, arguments),
            of_rows={key: value for key, value in arguments.items() if key in PER_ROW and isinstance(value, Tensor)},
        )

    @property
    def denominator(self) -> float | None:
        """What the result of this call was divided by, in proportion to other micro-batches."""
        if self.reduction == "sum":
            return 1.0
        if self.reduction == "none" or self.name not in LABELS:
            return None if self.reduction == "none" else self.divisor
        return None if self.labels is None else float(sum_of_weights(self.labels, self.ignored, self.weight))


def _divisor(name: str, reduction: object, arguments: Mapping[str, Any]) -> float | None:
    """What the mean of a loss divides by, as far as the shapes of its arguments say it."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    target, weight = arguments.get("target"), arguments.get("weight")
    if name in LABELS or not tensors:
        return None
    first = tensors[0]
    if name == "ctc_loss":
        return float(len(arguments["target_lengths"]))
    if reduction == "batchmean":
        return float(len(first))
    if name in ROWS:
        return float(len(first) if first is target else first.shape[:-1].numel())
    if name in WEIGHTED and isinstance(weight, Tensor):
        return float(weight.sum())
    return float(torch.broadcast_shapes(first.shape, first.shape if target is None else target.shape).numel())


_signature = lru_cache(inspect.signature)


def read_loss_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossCall | None:
    """Reads a call of a function of torch, by its name; None if the function is not a loss."""
    if name not in LABELS | ELEMENTS | ROWS:
        return None
    try:
        given = _signature(getattr(functional, name)).bind(*args, **kwargs)
        given.apply_defaults()
        return LossCall.of(name, given.arguments)
    except (TypeError, ValueError, RuntimeError):  # The call itself will raise.
        return None


def read_loss(loss_fn: object, target: Tree = None) -> LossCall | None:
    """Reads a loss of torch, also in a `functools.partial`, as its call on a target; None of any other function."""
    keywords: dict[str, Any] = {}
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
        called = next((name for name in kind.forward.__code__.co_names if name in LABELS | ELEMENTS | ROWS), "")
        held = {name: getattr(function, name, None) for name in ("reduction", "ignore_index", *PER_ROW)}
        return LossCall.of(called, {"target": target} | held)._replace(is_loss=True)
    name = getattr(function, "__name__", "")
    call = read_loss_call(name, (None, target), keywords) if getattr(functional, name, None) is function else None
    return None if call is None else call._replace(is_loss=True)


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


@dataclass(frozen=True)
class LossAverage:
    """What the mean of a loss divides by, as a function of the target of a micro-batch."""

    by: Literal["labels", "elements", "rows of the target", "rows", "sum"] = "rows"
    leaf: int = 0  # which leaf of the target is counted
    shifted: bool = False  # whether the first label of each row is left out, as in predicting the next token
    ignored: object = None
    weight: Tensor | None = None

    @property
    def reduction(self) -> Reduction:
        """The same as `step` takes it."""
        return "sum" if self.by == "sum" else "mean" if self.by == "rows" else self.count

    def count(self, target: Tree) -> float:
        """What the mean divides by."""
        counted: Any = tree_leaves(target)[self.leaf]
        if self.by != "labels":
            return float(counted.numel() if self.by == "elements" else len(counted))
        labels = counted[..., 1:] if self.shifted else counted
        return float(sum_of_weights(labels, self.ignored, self.weight))


def find_average(calls: Sequence[LossCall], target: Tree, rows: int, *, ready_made: bool) -> LossAverage | None:
    """Finds what a loss divides by, from the losses of torch that it called; None if they do not show it.

    Args:
        calls: The calls.
        target: The target of the micro-batch, or whatever else the labels can be found in.
        rows: The rows of the micro-batch.
        ready_made: Whether the rows of other micro-batches may have different numbers of elements.
    """
    if any(call.reduction == "sum" and call.is_loss for call in calls):
        return LossAverage("sum")
    means = [call for call in calls if call.reduction in ("mean", "batchmean")]
    labels = [call for call in means if call.name in LABELS]
    found = [_locate(call, target, rows, ready_made=ready_made) for call in labels or means]
    if not found or None in found or len({call.denominator for call in labels}) > 1:
        return None
    return found[0]


def read_average(loss_fn: object, target: Tree, rows: int, *, ready_made: bool) -> LossAverage | None:
    """Finds what a loss of torch divides by, without calling it; None of any other function."""
    call = read_loss(loss_fn, target)
    return None if call is None else find_average([call], target, rows, ready_made=ready_made)


def _locate(call: LossCall, target: Tree, rows: int, *, ready_made: bool) -> LossAverage | None:
    """Finds the leaf of a target that has what a call divides by, and how to count it."""
    each = tree_leaves(target)
    names = map(str, target) if isinstance(target, Mapping) and len(target) == len(each) else repeat("")
    leaves = [
        (at, name, leaf)
        for at, (name, leaf) in enumerate(zip(names, each, strict=False))
        if isinstance(leaf, Tensor) and leaf.dim()
    ]
    if call.name in LABELS:
        shifts = ((at, name, is_shifted(call.labels, leaf)) for at, name, leaf in leaves)
        found = sorted(("label" not in name, shifted, at) for at, name, shifted in shifts if shifted is not None)
        return LossAverage("labels", found[0][2], found[0][1], call.ignored, call.weight) if found else None
    if not ready_made:
        return LossAverage()
    for at, _, leaf in leaves:
        if leaf.numel() == call.divisor and call.name in ELEMENTS and call.reduction == "mean":
            return LossAverage("elements", at)
        if len(leaf) == call.divisor:
            return LossAverage("rows of the target", at)
    return LossAverage() if call.divisor == rows else None


def sum_of_weights(target: Tree, ignored: object, weight: object) -> Any:
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
    loss = loss_fn(output, target, **popped)
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


def runs_once(loss_fn: object) -> bool:
    """Whether a loss function says, by an attribute `runs_once`, that it must not be called again for a check."""
    return bool(getattr(loss_fn, "runs_once", False))


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


class LossReader(OwnMode):
    """Observes the calls of torch's losses inside the context, and what they return."""

    def __init__(self, calls: list[LossCall]) -> None:
        super().__init__()
        self.calls, self.results = calls, list[object]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = read_loss_call(getattr(func, "__name__", ""), args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if call is not None:
            self.calls.append(call)
            self.results.append(result)
        return result
