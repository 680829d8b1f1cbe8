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
from gpipe.batch.microbatch import (
    MicroBatches,
    as_tree,
    count_rows,
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
    """The factor of the gradients, which a scaler knows; `devices` are those of the stages."""
    if scaler is None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"scale={scale!r}; give a number, or scaler= for a torch.amp.GradScaler")
        if not math.isfinite(scale) or not scale:
            raise ValueError(f"scale={scale!r} would leave nothing of the gradients; give a finite number, not 0")
        return scale
    if scale != 1.0:
        raise ValueError(f"scale={scale!r} and scaler= both say how gradients are scaled; leave scale out")
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a {type(scaler).__name__}; give a torch.amp.GradScaler or a gpipe.GradScaler")
    is_torchs, why = scaler.is_enabled() and not hasattr(scaler, "agrees"), "scaler is a torch.amp.GradScaler, which"
    if is_torchs and processes > 1:
        alone = "looks at the gradients of this process alone: some ranks would skip a step that others do"
        raise TypeError(f"{why} {alone}; make it gpipe.GradScaler(pipe) in every process")
    if is_torchs and len({device.type for device in devices}) > 1:
        copies = "copies its numbers between devices and CPUs without waiting, and this pipe is on both"
        raise TypeError(f"{why} {copies}; make it gpipe.GradScaler(pipe)")
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
        remedy = "give a function of (output, target), such as nn.MSELoss() or torch.nn.functional.mse_loss"
        raise TypeError(f"loss_fn is {found}; {remedy}")


def split_alike(micro_batches: int, **trees: Tree) -> tuple[list[int], list[list[Tree]]]:
    """Cuts trees of as many rows as the `inputs` among them, by name; gives the rows of each part, and the parts.

    There are at most `micro_batches` parts, and none is empty. Ready-made ones are taken as they are.
    """
    check_values(**trees)
    inputs = trees["inputs"]
    if MicroBatches in map(type, trees.values()):
        check_ready_made(**{what: _count_parts(tree) for what, tree in trees.items()})
        assert isinstance(inputs, MicroBatches)
        if len(inputs) > micro_batches:
            remedy = f"make the pipe with micro_batches={len(inputs)}, or put several of them together"
            given = f"{len(inputs)} ready-made micro-batches were given"
            raise ValueError(f"{given} to a pipe with micro_batches={micro_batches}; {remedy}")
        parts = [take_parts(tree) for tree in trees.values() if isinstance(tree, MicroBatches)]
        return [count_rows(part, m) for m, part in enumerate(inputs)], parts
    rows = count_rows(inputs)
    count = min(micro_batches, rows)
    found, mistakes = [], list[str]()
    for what, tree in trees.items():
        try:
            found.append(split(tree, rows, count, what, strict=True))
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return rows_of_parts(rows, count), found


def split_targets(targets: Tree, rows: Sequence[int], *, ready_made: bool) -> list[Tree]:
    """Cuts targets as inputs were cut that others have: into parts of so many rows, or ready-made ones."""
    check_values(targets=targets)
    check_ready_made(inputs=len(rows) if ready_made else None, targets=_count_parts(targets))
    if isinstance(targets, MicroBatches):
        return take_parts(targets)
    return split(targets, sum(rows), len(rows), "targets", strict=True)


def _count_parts(tree: Tree) -> int | None:
    return len(tree) if isinstance(tree, MicroBatches) else None


def check_ready_made(**counts: int | None) -> None:
    """Checks that all or none of these are ready-made, and as many parts."""
    if len(set(counts.values())) == 1:
        return
    plain = [what for what, count in counts.items() if count is None]
    if plain:
        ready = [what for what, count in counts.items() if count is not None]
        remedy = "give both as gpipe.MicroBatches, an element for each micro-batch, or neither"
        raise ValueError(f"{' and '.join(ready)} are gpipe.MicroBatches and {' and '.join(plain)} are not; {remedy}")
    why = f"{' and '.join(f'{what} are {count} micro-batches' for what, count in counts.items())}"
    raise ValueError(f"{why}; give a target for each micro-batch of the inputs")


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
        remedy = "use the plain layers for forward-mode derivatives"
        raise ValueError(f"an input has a tangent (torch.autograd.forward_ad), and a pipeline carries none: {remedy}")


def refuse_gradients_of_inputs(inputs: Tree) -> None:
    """Refuses inputs of a step that would wait for gradients."""
    if any(map(attrgetter("requires_grad"), tensors_in(inputs))):
        remedy = "use loss_fn(pipe(inputs), targets).backward(), or detach the input"
        raise ValueError(f"an input requires a gradient, and step() gives none to its inputs; {remedy}")
