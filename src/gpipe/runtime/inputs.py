"""What one call of a pipe is given, checked and cut into micro-batches."""

import math
from collections.abc import Sequence
from itertools import chain
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from gpipe._torch.autograd import is_differentiated_forward
from gpipe.stages.microbatch import (
    MicroBatches,
    as_tree,
    count_rows,
    find_unsplit_lists,
    find_unsplittable,
    rows_of_parts,
    split,
    take_parts,
)
from gpipe.stages.tree import Tree, tensors_in

NO_GRAPH = (
    "a pipe is run by threads or processes, which torch.jit and torch.export cannot follow; trace, script or export "
    "the plain layers: torch.nn.Sequential(*layers)"
)


def scaler_device(devices: Sequence[torch.device]) -> torch.device:
    """Where a scaler's own numbers are: torch copies them to CPUs without waiting, so there if a rank is on one."""
    return next((device for device in devices if device.type == "cpu"), devices[-1])


def read_scale(scale: float, scaler: Any, devices: Sequence[torch.device], *, processes: int = 1) -> float:
    """The factor of the gradients, which a scaler knows; `devices` are those of the stages.

    Raises:
        ValueError: Both are given, or the scale is no finite number but 0.
        TypeError: The scaler is none, or not one for several processes or kinds of devices, or the scale no number.
    """
    if scaler is None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"scale={scale!r}; give a number, or scaler= for a torch.amp.GradScaler")
        if not math.isfinite(scale) or not scale:
            raise ValueError(
                f"scale={scale!r} would leave nothing of the gradients; give a finite number other than 0"
            )
        return scale
    if scale != 1.0:
        raise ValueError(f"scale={scale!r} and scaler= both say how gradients are scaled; leave scale out")
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a {type(scaler).__name__}; give a torch.amp.GradScaler or a gpipe.GradScaler")
    if processes > 1 and scaler.is_enabled() and not hasattr(scaler, "agrees"):
        raise TypeError(
            "scaler is a torch.amp.GradScaler, which looks at the gradients of this process alone: some ranks would "
            "skip a step that others do; make it gpipe.GradScaler(pipe) in every process"
        )
    if len({device.type for device in devices}) > 1 and scaler.is_enabled() and not hasattr(scaler, "agrees"):
        raise TypeError(
            "scaler is a torch.amp.GradScaler, which copies its numbers between devices and CPUs without waiting, "
            "and this pipe is on both; make it gpipe.GradScaler(pipe)"
        )
    return float(scaler.scale(torch.ones((), device=scaler_device(devices))))  # which also tells it that it is in use


def check_numbers(**given: object) -> None:
    """Checks that what has these names are numbers."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
            raise TypeError(f"{name}={value!r}; give a number")


def check_loss_fn(loss_fn: object) -> None:
    """Checks that a loss can be called with an output and a target."""
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        name = f"nn.{loss_fn.__name__}" if hasattr(nn, loss_fn.__name__) else loss_fn.__name__
        raise TypeError(f"loss_fn is the class {name}; give one of it: {name}()")
    if not callable(loss_fn):
        found = "None" if loss_fn is None else f"a {type(loss_fn).__name__}"
        raise TypeError(
            f"loss_fn is {found}; give a function of (output, target), such as nn.MSELoss() or "
            f"torch.nn.functional.mse_loss"
        )


def split_alike(micro_batches: int, **trees: Tree) -> tuple[list[int], list[list[Tree]]]:
    """Cuts trees of as many rows as the `inputs` among them, by name; gives the rows of each part, and the parts.

    There are at most `micro_batches` parts, and none is empty. Ready-made ones are taken as they are.

    Raises:
        ValueError: There are no rows, or not as many everywhere; or ready-made parts are too many, or not as many
            everywhere; names all that is wrong.
        TypeError: Something in them cannot be split; names all that is.

    >>> import torch
    >>> rows, ((first, *_), targets) = split_alike(2, inputs=torch.zeros(5, 4), targets=torch.zeros(5))
    >>> rows, first.shape, len(targets)
    ([3, 2], torch.Size([3, 4]), 2)
    """
    check_values(**trees)
    inputs = trees["inputs"]
    if MicroBatches in map(type, trees.values()):
        check_ready_made(**{what: _count_parts(tree) for what, tree in trees.items()})
        assert isinstance(inputs, MicroBatches)
        if len(inputs) > micro_batches:
            raise ValueError(
                f"{len(inputs)} ready-made micro-batches were given to a pipe with micro_batches={micro_batches}; "
                f"make the pipe with micro_batches={len(inputs)}, or put several of them together"
            )
        parts = [take_parts(tree) for tree in trees.values() if isinstance(tree, MicroBatches)]
        return [count_rows(part, m) for m, part in enumerate(inputs)], parts
    rows = count_rows(inputs)
    count = min(micro_batches, rows)
    found, mistakes = [], list[str]()
    for what, tree in trees.items():
        if count > 1 and type(tree) is not Tensor:
            mistakes += find_unsplit_lists(what, tree, rows)
        try:
            found.append(split(tree, rows, count, what))
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return rows_of_parts(rows, count), found


def split_targets(targets: Tree, rows: Sequence[int], *, ready_made: bool) -> list[Tree]:
    """Cuts targets as the inputs were cut, of which others have the rows of each part, and whether it was ready-made.

    Raises:
        ValueError: The targets have other rows, or parts.
        TypeError: Something in them cannot be split.

    >>> import torch
    >>> first, second = split_targets(torch.zeros(5), [3, 2], ready_made=False)
    >>> first.shape, second.shape
    (torch.Size([3]), torch.Size([2]))
    """
    check_values(targets=targets)
    check_ready_made(inputs=len(rows) if ready_made else None, targets=_count_parts(targets))
    if isinstance(targets, MicroBatches):
        return take_parts(targets)
    return split(targets, sum(rows), len(rows), "targets")


def _count_parts(tree: Tree) -> int | None:
    return len(tree) if isinstance(tree, MicroBatches) else None


def check_ready_made(**counts: int | None) -> None:
    """Checks that all or none of these are ready-made, and as many parts."""
    if len(set(counts.values())) == 1:
        return
    plain = [what for what, count in counts.items() if count is None]
    if plain:
        ready = [what for what, count in counts.items() if count is not None]
        raise ValueError(
            f"{' and '.join(ready)} are gpipe.MicroBatches and {' and '.join(plain)} are not; give both as "
            f"gpipe.MicroBatches, an element for each micro-batch, or neither"
        )
    raise ValueError(
        f"{' and '.join(f'{what} are {count} micro-batches' for what, count in counts.items())}; give a target for "
        f"each micro-batch of the inputs"
    )


def check_values(**trees: Tree) -> None:
    """Checks that all in these trees can be split, or taken as it is."""
    if strange := list(chain.from_iterable(map(find_unsplittable, trees, trees.values()))):
        raise TypeError("\n".join(strange))


def refuse_transforms(inputs: Tree) -> None:
    """Refuses to be made a graph of, and forward-mode differentiation: tangents would be lost at the first cut."""
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # untyped in torch
    if traced or torch.compiler.is_exporting():
        raise TypeError(NO_GRAPH)
    if not is_differentiated_forward():
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors_in(as_tree(inputs))):
        raise ValueError(
            "an input has a tangent (torch.autograd.forward_ad), and a pipeline carries none: use the plain layers "
            "for forward-mode derivatives"
        )


def refuse_gradients_of_inputs(inputs: Tree) -> None:
    """Refuses inputs of a step that would wait for gradients."""
    if any(map(attrgetter("requires_grad"), tensors_in(inputs))):
        raise ValueError(
            "an input requires a gradient, and step() gives none to its inputs; "
            "use loss_fn(pipe(inputs), targets).backward(), or detach the input"
        )
