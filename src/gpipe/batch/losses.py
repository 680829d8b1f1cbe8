"""Calls losses, and decides how much each micro-batch counts in the loss of the mini-batch.

Most losses are means, and the divisor of the mean is the weight of a micro-batch. The divisor is the number of rows,
the number of elements of the target, or the sum of the class weights of all labels that are not ignored.

`find_average` determines the divisor from calls of torch's losses:

- a torch loss that the user passes to `step`,
- calls inside the user's loss function, which `LossReader` observes,
- calls inside a model.

`gpipe.features.loss_check` compares the result with the loss of the mini-batch.
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
    """A loss module. Its type parameter is the type that `forward` returns, because `Module.__call__` returns Any."""

    @property
    def forward(self) -> Callable[..., T_co]:
        """Returns the loss, or a tuple (loss, metrics)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss, or a tuple (loss, metrics)."""


NO_METRICS = object()
LABELS = frozenset({"cross_entropy", "nll_loss", "linear_cross_entropy"})
"""Losses of torch that average over the labels that are not ignored."""
ELEMENTS = frozenset({
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss", "hinge_embedding_loss",
    "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss",
    "soft_margin_loss",
})  # fmt: skip
"""Losses of torch that average over all elements."""
ROWS = frozenset({
    "cosine_embedding_loss", "ctc_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
    "triplet_margin_loss", "triplet_margin_with_distance_loss",
})  # fmt: skip
"""Losses of torch that average over rows, regardless of the number of elements per row."""
WEIGHTED = ("mse_loss", "l1_loss")
"""Losses of torch that divide by the sum of their `weight`, if the user passes a weight."""
PER_ROW = ("weight", "pos_weight", "var")
"""Arguments of torch's losses that can have one entry per row, or one per class."""

NO_GRADIENT = (
    "loss_fn returned a loss that does not require a gradient. Compute it from the output of the model, or call "
    "step() under torch.no_grad(). [loss-without-gradient]"
)


class LossCall(NamedTuple):
    """One call of a loss of torch.

    Attributes:
        name: The name of the function.
        reduction: The reduction, such as "mean".
        ignored: The label that does not count. None if the loss has no such label.
        weight: The weights of the classes.
        labels: The target, for the losses in `LABELS`.
        divisor: The divisor of the mean, for all other losses.
        is_loss: Whether the user's loss function returned the result of this call.
        of_rows: The arguments in `PER_ROW` that may have one entry per row of the target.
    """

    name: str
    reduction: str | None
    ignored: object = None
    weight: Tensor | None = None
    labels: Tensor | None = None
    divisor: float | None = None
    is_loss: bool = False
    of_rows: Mapping[str, Tensor] = {}

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> "LossCall":
        """Reads the arguments of a loss.

        Args:
            name: The name of the function.
            arguments: All arguments by name, including defaults.
        """
        reduction, weight, target = arguments.get("reduction"), arguments.get("weight"), arguments.get("target")
        ignored = arguments.get("ignore_index")
        average, reduce = arguments.get("size_average"), arguments.get("reduce")  # Deprecated; torch prefers them.
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
        """The divisor of the result, which can be compared between micro-batches. None if the divisor is unknown."""
        if self.reduction == "sum":
            return 1.0
        if self.reduction == "none" or self.name not in LABELS:
            return None if self.reduction == "none" else self.divisor
        return None if self.labels is None else float(sum_of_weights(self.labels, self.ignored, self.weight))


def _divisor(name: str, reduction: object, arguments: Mapping[str, Any]) -> float | None:
    """Returns the divisor of a mean over elements or rows, from the shapes of the arguments. None if unknown."""
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
    """Reads a call of a torch function. Returns None if the function is not a loss or the arguments are invalid."""
    if name not in LABELS | ELEMENTS | ROWS:
        return None
    try:
        bound = _signature(getattr(functional, name)).bind(*args, **kwargs)
        bound.apply_defaults()
        return LossCall.of(name, bound.arguments)
    except (TypeError, ValueError, RuntimeError):  # The call itself will raise.
        return None


def read_loss(loss_fn: object, target: Tree = None) -> LossCall | None:
    """Returns the call that a torch loss, or a `functools.partial` of a torch loss, would make on a target.

    Returns None for any other function, including modules whose forward is not torch's.
    """
    keywords: dict[str, Any] = {}
    if isinstance(loss_fn, partial) and not loss_fn.args:
        keywords, loss_fn = loss_fn.keywords, loss_fn.func
    if isinstance(loss_fn, MethodType) and loss_fn.__name__ in ("forward", "__call__", nn.Module.__call__.__name__):
        loss_fn = loss_fn.__self__
    function = without_compiler(loss_fn)
    if isinstance(function, nn.Module):
        loss_class = type(function)
        is_customized = "forward" in vars(function) or loss_class.__call__ is not nn.Module.__call__
        if keywords or is_customized or not is_loss_of_torch(function):
            return None
        called = next((name for name in loss_class.forward.__code__.co_names if name in LABELS | ELEMENTS | ROWS), "")
        settings = {name: getattr(function, name, None) for name in ("reduction", "ignore_index", *PER_ROW)}
        return LossCall.of(called, {"target": target} | settings)._replace(is_loss=True)
    name = getattr(function, "__name__", "")
    call = read_loss_call(name, (None, target), keywords) if getattr(functional, name, None) is function else None
    return None if call is None else call._replace(is_loss=True)


def find_contradiction(loss_fn: object, reduction: Reduction) -> list[str]:
    """Returns a finding if a torch loss is a sum but `step` averages over micro-batches, or the reverse."""
    loss = read_loss(loss_fn)
    if loss is None or (reduction, loss.reduction) not in (("mean", "sum"), ("sum", "mean")):
        return []
    return [
        f"loss_fn has reduction={loss.reduction!r}, but step() got reduction={reduction!r}. Remove reduction= from "
        f"step() to use the reduction of the loss. [reduction-conflict]"
    ]


@dataclass(frozen=True)
class LossAverage:
    """The divisor of a loss's mean, as a function of the target of a micro-batch.

    Attributes:
        by: The unit over which the mean is computed, such as rows. "sum" if the loss is not a mean.
        leaf: The index of the leaf of the target from which these units are counted.
        shifted: Whether the first label of each row does not count, as in next-token prediction.
        ignored: The label that does not count.
        weight: The weights of the classes.
    """

    by: Literal["labels", "elements", "rows of the target", "rows", "sum"] = "rows"
    leaf: int = 0
    shifted: bool = False
    ignored: object = None
    weight: Tensor | None = None

    @property
    def reduction(self) -> Reduction:
        """The value of the argument `reduction` of `step` with the same effect."""
        return "sum" if self.by == "sum" else "mean" if self.by == "rows" else self.count

    def count(self, target: Tree) -> float:
        """Returns the divisor for the target of a micro-batch."""
        counted: Any = tree_leaves(target)[self.leaf]
        if self.by != "labels":
            return float(counted.numel() if self.by == "elements" else len(counted))
        labels = counted[..., 1:] if self.shifted else counted
        return float(sum_of_weights(labels, self.ignored, self.weight))


def find_average(calls: Sequence[LossCall], target: Tree, rows: int, *, ready_made: bool) -> LossAverage | None:
    """Finds the divisor of a loss from the torch losses that the loss calls. None if these calls do not determine it.

    Args:
        calls: The calls of torch's losses in one micro-batch.
        target: The target of the micro-batch, or any other tree that contains the labels.
        rows: The number of rows of the micro-batch.
        ready_made: Whether the rows of other micro-batches can have different numbers of elements.
    """
    if any(call.reduction == "sum" and call.is_loss for call in calls):
        return LossAverage("sum")
    means = [call for call in calls if call.reduction in ("mean", "batchmean")]
    labels = [call for call in means if call.name in LABELS]
    averages = [_locate(call, target, rows, ready_made=ready_made) for call in labels or means]
    if not averages or None in averages or len({call.denominator for call in labels}) > 1:
        return None
    return averages[0]


def read_average(
    loss_fn: object, targets: Sequence[Tree], rows: Sequence[int], *, ready_made: bool
) -> LossAverage | None:
    """Finds the divisor of a torch loss without calling it. Returns None for any other function.

    `targets` and `rows` have one entry per micro-batch. Raises a ValueError if the loss has an attribute with one
    entry per row of the mini-batch.
    """
    target, call = targets[0], read_loss(loss_fn, targets[0])
    average = None if call is None else find_average([call], target, rows[0], ready_made=ready_made)
    if call is None or average is None or len(rows) == 1 or not isinstance(target, Tensor):
        return average
    for name, value in call.of_rows.items() if target.is_floating_point() else ():
        if value.dim() >= target.dim() and value.shape[0] == sum(rows):
            raise ValueError(
                f"loss_fn has a {name} of shape {tuple(value.shape)}, with one entry for each of the {sum(rows)} "
                f"rows. Pass it with the targets, which are split: step(inputs, (targets, {name}), lambda output, t: "
                f"loss(output, t[0], {name}=t[1])). [loss-weight-per-row]"
            )
    return average


def _locate(call: LossCall, target: Tree, rows: int, *, ready_made: bool) -> LossAverage | None:
    """Finds the leaf of a target whose size or labels determine the divisor of a call."""
    values = tree_leaves(target)
    names = map(str, target) if isinstance(target, Mapping) and len(target) == len(values) else repeat("")
    leaves = [
        (index, name, leaf)
        for index, (name, leaf) in enumerate(zip(names, values, strict=False))
        if isinstance(leaf, Tensor) and leaf.dim()
    ]
    if call.name in LABELS:
        shifts = ((index, name, is_shifted(call.labels, leaf)) for index, name, leaf in leaves)
        # Prefer leaves with "label" in their name, then unshifted labels, then the first leaf.
        matches = sorted(("label" not in name, shift, index) for index, name, shift in shifts if shift is not None)
        return LossAverage("labels", matches[0][2], matches[0][1], call.ignored, call.weight) if matches else None
    if not ready_made:
        return LossAverage()
    for index, _, leaf in leaves:
        if leaf.numel() == call.divisor and call.name in ELEMENTS and call.reduction == "mean":
            return LossAverage("elements", index)
        if len(leaf) == call.divisor:
            return LossAverage("rows of the target", index)
    return LossAverage() if call.divisor == rows else None


def sum_of_weights(target: Tree, ignored: object, weight: object) -> Any:
    """Returns the sum of the class weights of all labels that are not ignored, or without weights their number.

    For class probabilities, returns the number of positions.
    """
    if not isinstance(target, Tensor):
        return 1.0  # The loss itself will reject the target.
    if target.is_floating_point():  # Probabilities: the classes are in the second dimension, or in the only one.
        return target.numel() / target.shape[1] if target.dim() > 1 else 1.0
    counts = None if ignored is None else target.ne(ignored)  # type: ignore[call-overload]  # a number
    if not isinstance(weight, Tensor):
        return target.numel() if counts is None else counts.sum()
    labels = target.long().clamp(0, len(weight) - 1)  # The loss itself will reject labels out of range.
    weights = weight.detach().double().to(target.device)[labels]
    return (weights if counts is None else weights.mul(counts)).sum()


def is_shifted(target: Tensor | None, labels: object) -> bool | None:
    """Compares the target of a loss with labels in a tree.

    Returns False if the target is these labels, True if it lacks the first label of each row, and None otherwise.
    """
    if target is None or not isinstance(labels, Tensor) or not labels.dim():
        return None
    if labels.is_floating_point() or target.is_floating_point():
        return False if labels.shape == target.shape and torch.equal(labels, target) else None
    if labels.numel() and not target.numel() % labels.numel():
        copies = target.reshape(-1, *labels.shape)  # Multi-token prediction repeats all labels.
        if (copies == labels).all():
            return False
        return True if labels.dim() > 1 and (copies[..., :-1] == labels[..., 1:]).all() else None
    following = labels[..., 1:]
    has_size = labels.dim() > 1 and target.numel() == following.numel()
    return True if has_size and (target.reshape(following.shape) == following).all() else None


def call_loss(
    loss_fn: Callable[..., object], output: Tree, target: Tree, popped: Mapping[str, object]
) -> tuple[Tensor, object]:
    """Calls the user's loss function on a micro-batch. Returns the loss, and the metrics or `NO_METRICS`.

    The function may change its arguments in place.

    Raises:
        TypeError: If the function does not return a scalar loss, or a tuple (loss, metrics).
    """
    # `.data` has its own version counter; the targets of all micro-batches are views of one tensor and share one.
    target = replace_tensors(target, lambda tensor: tensor if tensor.requires_grad else tensor.data)
    loss = loss_fn(output, target, **popped)
    metrics = NO_METRICS
    if isinstance(loss, tuple) and len(loss) == 2 and not hasattr(loss, "loss"):
        loss, metrics = loss
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss if loss.dim() == 0 else loss.reshape(()), metrics
    raise TypeError(_invalid_loss(loss))


def observe_loss(
    loss_fn: Callable[..., object], output: Tree, target: Tree, popped: Mapping[str, object]
) -> tuple[Tensor, object, list[LossCall]]:
    """Calls the user's loss function like `call_loss`. Also returns the calls of torch's losses inside it."""
    with (reader := LossReader([])):
        loss, metrics = call_loss(loss_fn, output, target, popped)
    calls = zip(reader.calls, reader.results, strict=True)
    return loss, metrics, [call._replace(is_loss=result is loss) for call, result in calls]


def _invalid_loss(loss: object) -> str:
    """Returns the message for a value that is not a scalar loss."""
    if isinstance(loss, Tensor) and loss.numel() != 1:
        problem, fix = f"a tensor of shape {tuple(loss.shape)}", "Reduce it to one number with .mean() or .sum()"
    elif isinstance(loss, Tensor):
        problem, fix = f"a tensor of dtype {loss.dtype}", "Return a floating-point loss"
    elif isinstance(loss, (int, float)):
        problem, fix = f"the Python number {loss!r}, which has no gradient", "Return the tensor, without .item()"
    elif loss is None:
        problem, fix = "None", "Add a return statement"
    elif isinstance(loss, tuple) and not hasattr(loss, "loss"):
        problem, fix = f"a tuple of length {len(loss)}", "Return (loss, metrics), with all metrics in one value"
    elif hasattr(loss, "loss"):
        problem, fix = f"a {type(loss).__name__}", "Return its .loss"
    else:
        problem, fix = f"a {type(loss).__name__}", "Return only the loss, or (loss, metrics)"
    return f"loss_fn returned {problem}, not the scalar loss of the micro-batch. {fix}. [loss-not-scalar]"


def runs_once(loss_fn: object) -> bool:
    """Whether a loss function has set its attribute `runs_once`, so that gpipe must not call it again for checks."""
    return bool(getattr(loss_fn, "runs_once", False))


def own_loss(output: Tree, target: Tree = None) -> Tensor:
    """Returns the loss in the output of a model.

    The loss is the attribute or entry `loss`, the first element of a tuple, or the output itself.

    Raises:
        TypeError: If the loss is not a scalar floating-point tensor.
    """
    loss: Any = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, tuple) and output:
        loss = output[0]
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss
    kind = f"the output is a {type(output).__name__}" if loss is output else f"the loss is a {type(loss).__name__}"
    raise TypeError(
        f"step() got neither targets nor loss_fn, but the model did not return a loss ({kind}). Pass labels=..., or "
        f"call step(inputs, targets, loss_fn). [model-returns-no-loss]"
    )


class LossReader(OwnMode):
    """Records the calls of torch's losses inside the context, and their results."""

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
