"""Finds how a loss function averages, by which the losses of micro-batches make that of the mini-batch.

Most divide by a number that grows with the rows. Losses of labels divide by the labels that count, each times the
weight of its class, so a micro-batch has a share in the mini-batch's loss as it has in these.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe._torch.modes import without_compiler
from gpipe._torch.trees import tree_leaves
from gpipe.stages.layout import copy_of
from gpipe.stages.microbatch import MicroBatches, Reduction
from gpipe.stages.tree import Tree, replace_tensors

LossArguments: TypeAlias = Mapping[str, object]
"""The arguments of a loss of torch that say how it averages: `reduction`, `weight`, and for labels `ignore_index`."""

TORCH_LOSSES = "torch.nn.modules.loss"
NO_METRICS = object()
IGNORED = -100  # the label that torch's losses ignore by default, and users' losses by habit
NAMES = ("reduction", "ignore_index", "weight", "pos_weight", "var")
OF_ELEMENTS = "of elements"
"""The argument that is not torch's: whether a loss averages over all elements of its target."""
ELEMENTWISE = frozenset(
    {"MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss", "SoftMarginLoss"}
    | {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"}
    | {"binary_cross_entropy_with_logits"}
)
IGNORED_LABELS = (
    f"targets hold labels {IGNORED}, and loss_fn is none of torch's own, so it cannot be known whether it ignores "
    f"them; micro-batches are weighed by their rows. If it averages over the other labels, give "
    f"step(..., reduction=lambda target: (target != {IGNORED}).sum()), else reduction='mean'"
)
NO_GRADIENT = (
    "the loss needs no gradient: it depends on no parameter that requires one; "
    "return a loss computed from the output, or call step() under torch.no_grad()"
)


def find_contradiction(loss_fn: object, reduction: Reduction) -> list[str]:
    """Tells of a loss of torch that sums where its micro-batches are said to be averaged, or the other way round.

    >>> len(find_contradiction(nn.MSELoss(), "sum")), find_contradiction(nn.MSELoss(), "mean")
    (1, [])
    """
    own = (_arguments_of(loss_fn) or {}).get("reduction")
    if reduction not in ("mean", "sum") or own not in ("mean", "sum") or own == reduction:
        return []
    return [
        f"loss_fn has reduction={own!r} and step was given reduction={reduction!r}: losses of micro-batches, each a "
        f"{own} over its rows, are put together by {reduction}; leave out step's reduction= to have the loss's own"
    ]


def find_reduction(loss_fn: object) -> Reduction | None:
    """How a loss of torch.nn or torch.nn.functional averages, also in a `functools.partial`; None of any other.

    Raises:
        ValueError: It does not average: it gives a loss for each row.

    >>> find_reduction(nn.MSELoss()), find_reduction(partial(functional.l1_loss, reduction="sum"))
    ('mean', 'sum')
    >>> count = find_reduction(nn.CrossEntropyLoss(ignore_index=0))
    >>> float(count(torch.tensor([2, 0, 1])))
    2.0
    >>> find_reduction(lambda output, target: output.sum()) is None
    True
    """
    arguments = _arguments_of(loss_fn)
    if arguments is None or arguments["reduction"] is None:
        return None
    match arguments["reduction"]:
        case "none":
            raise ValueError(
                "loss_fn gives a loss for each row, by reduction='none', and step() needs one of each micro-batch: "
                "add .mean(), as in loss_fn=lambda output, target: loss(output, target).mean(), or leave "
                "reduction='none' out"
            )
        case "sum":
            return "sum"
        case "mean" if "ignore_index" in arguments:
            return partial(sum_of_weights, ignored=arguments["ignore_index"], weight=arguments["weight"])
    return "mean"


def for_targets(reduction: Reduction, targets: Tree, loss_fn: object) -> Reduction:
    """The same for these targets: where no label is ignored, no micro-batch need be looked at.

    Ready-made micro-batches may have other lengths each: there a mean over elements counts these.
    """
    if isinstance(targets, MicroBatches) and reduction == "mean" and (_arguments_of(loss_fn) or {}).get(OF_ELEMENTS):
        return count_elements if all(isinstance(part, Tensor) for part in targets) else reduction
    if not isinstance(reduction, partial) or not isinstance(targets, Tensor):
        return reduction
    ignored = reduction.keywords["ignored"]
    return reduction if ignored is None or (targets == ignored).any() else partial(reduction, ignored=None)


def count_elements(target: Any) -> float:
    """The elements of a target that is a tensor."""
    return float(target.numel())


def holds_ignored_labels(targets: Tree) -> bool:
    """Whether a tensor of whole numbers among the targets has labels that torch's losses would ignore."""
    return any(
        bool((leaf == IGNORED).any())
        for leaf in tree_leaves(targets)
        if isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.int32, torch.int16)
    )


def check_weights_of_rows(loss_fn: object, targets: Sequence[Tree], rows: Sequence[int]) -> None:
    """Checks that a loss of torch holds nothing that has a row for each of the mini-batch's."""
    arguments = _arguments_of(loss_fn) if len(rows) > 1 else None
    target = targets[0]
    if arguments is None or not isinstance(target, Tensor) or not target.is_floating_point():
        return
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() >= target.dim() and value.shape[0] == sum(rows):
            raise ValueError(
                f"{name} of loss_fn has shape {tuple(value.shape)}, a row for each of the mini-batch's {sum(rows)}, "
                f"and would meet micro-batches of {rows[0]}; hand it over among the targets, which are split: "
                f"step(inputs, (targets, {name}), lambda output, t: loss(output, t[0], {name}=t[1]))"
            )


def _arguments_of(loss_fn: object) -> LossArguments | None:
    """The arguments of a loss of torch; None of what is not torch's, or does more than torch's."""
    if isinstance(loss_fn, partial):
        return None if loss_fn.args else _arguments_of_function(loss_fn.func, loss_fn.keywords)
    if isinstance(loss_fn, MethodType) and loss_fn.__name__ in ("forward", "__call__", nn.Module.__call__.__name__):
        return _arguments_of(loss_fn.__self__) if isinstance(loss_fn.__self__, nn.Module) else None
    if isinstance(loss_fn, nn.Module):
        return _arguments_of_module(loss_fn)
    return _arguments_of_function(loss_fn, {})


def _arguments_of_module(module: nn.Module) -> LossArguments | None:
    module = without_compiler(module)
    kind = type(module)
    if (
        module_of_forward(module) != TORCH_LOSSES
        or kind.__call__ is not nn.Module.__call__
        or "forward" in vars(module)
    ):
        return None
    elements = any(base.__name__ in ELEMENTWISE for base in kind.__mro__)
    return {name: getattr(module, name) for name in NAMES if hasattr(module, name)} | {OF_ELEMENTS: elements}


def module_of_forward(module: nn.Module) -> str:
    """The module of Python that a module's forward was written in."""
    return getattr(getattr(type(module), "forward", None), "__module__", "")


def _arguments_of_function(called: object, keywords: Mapping[str, object]) -> LossArguments | None:
    if isinstance(called, (partial, nn.Module)):  # a partial of these
        return None if keywords else _arguments_of(called)
    function = without_compiler(called)
    known = getattr(functional, getattr(function, "__name__", ""), None)
    if not callable(known) or known is not function:
        return None
    defaults, needed = _keywords(known)
    if not keywords.keys() <= defaults.keys() | needed or not needed <= keywords.keys():
        return None  # calling it will raise
    arguments = {**defaults, **keywords}
    found = {name: arguments[name] for name in NAMES if name in arguments}
    average, reduce = arguments.get("size_average"), arguments.get("reduce")  # older, and they overrule it
    if average is not None or reduce is not None:
        found["reduction"] = "none" if reduce is False else "sum" if average is False else "mean"
    return {"reduction": None, **found, OF_ELEMENTS: known.__name__ in ELEMENTWISE}


@lru_cache
def _keywords(function: Callable[..., object]) -> tuple[LossArguments, set[str]]:
    """What a function takes behind its output and target: defaults by name, and the names of what must be given."""
    behind = list(inspect.signature(function).parameters.values())[2:]
    needed = {parameter.name for parameter in behind if parameter.default is inspect.Parameter.empty}
    return {parameter.name: parameter.default for parameter in behind if parameter.name not in needed}, needed


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


def call_loss(
    loss_fn: Callable[..., object], output: Tree, target: Tree, popped: Mapping[str, object]
) -> tuple[Tensor, object]:
    """The loss of a micro-batch, and metrics or `NO_METRICS`; the function may work in place on what it is given."""
    target = replace_tensors(target, _with_own_version)
    return _read_loss(loss_fn(replace_tensors(output, _clone_of_leaf_view), target, **popped))


def _read_loss(returned: object) -> tuple[Tensor, object]:
    """What a loss function returned: a loss that is a scalar tensor, and metrics or `NO_METRICS`."""
    loss, metrics = returned, NO_METRICS
    if isinstance(returned, tuple) and len(returned) == 2 and not hasattr(returned, "loss"):
        loss, metrics = returned
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
    if hasattr(loss, "loss"):
        return f"a {type(loss).__name__}: return its .loss"
    if isinstance(loss, (dict, list)):
        return f"a {type(loss).__name__}: return the loss in it, or (loss, metrics)"
    if isinstance(loss, tuple):
        return f"a tuple of {len(loss)}: put what is not the loss into one, (loss, (..., ...))"
    return repr(loss)


def _with_own_version(target: Tensor) -> Tensor:
    """A target whose changes in place are counted apart from those of other micro-batches, views of one tensor."""
    return target if target.requires_grad else target.data


def _clone_of_leaf_view(output: Tensor) -> Tensor:
    """An output for the loss to work on in place: one that a stage only passed on is a view of a leaf."""
    base = output._base
    return copy_of(output) if base is not None and base.is_leaf and base.requires_grad else output


NO_LOSS = (
    "step() was given neither targets nor loss_fn, so the loss is the model's own, and its output has none "
    "({found}): give what it makes a loss of (labels=...), or call step(inputs, targets, loss_fn)"
)


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
