"""Checks the arguments of a step or call, and splits its inputs and targets into micro-batches."""

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
    "torch.jit and torch.export cannot trace a pipe, because it runs layers in threads or processes. Trace, script "
    "or export the layers instead: torch.nn.Sequential(*layers). [pipe-not-traceable]"
)


def scaler_device(devices: Sequence[torch.device]) -> torch.device:
    """Returns the device for the state of a GradScaler: the CPU if the pipe uses the CPU, else the last device.

    torch copies the state to CPUs without waiting for the copy, so a CPU must hold the state itself.
    """
    return next((device for device in devices if device.type == "cpu"), devices[-1])


def read_scale(scale: float, scaler: Any, devices: Sequence[torch.device], *, processes: int = 1) -> float:
    """Returns the factor by which a step multiplies the loss, and therefore all gradients.

    Args:
        scale: The factor. It must be 1 if you pass a `scaler`.
        scaler: A GradScaler that determines the factor, or None.
        devices: The devices of the partitions.
        processes: The number of processes of the pipe.

    Raises:
        TypeError: If `scale` is not a number, or if the scaler does not support these devices or processes.
        ValueError: If `scale` is 0 or not finite, or if both arguments set the factor.
    """
    if scaler is None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"scale={scale!r} is not a number. Pass a number, or scaler= with a gpipe.GradScaler.")
        if not math.isfinite(scale) or not scale:
            raise ValueError(f"scale={scale!r} would erase all gradients. Pass a finite number other than 0.")
        return scale
    if scale != 1.0:
        raise ValueError(f"scale={scale!r} cannot be combined with scaler=, which sets the scale. Remove scale=.")
    if not isinstance(scaler, torch.amp.GradScaler):
        kind = type(scaler).__name__
        raise TypeError(
            f"scaler= is a {kind}, not a GradScaler. Pass gpipe.GradScaler(pipe) or a torch.amp.GradScaler."
        )
    is_of_torch = scaler.is_enabled() and not hasattr(scaler, "agrees")
    if is_of_torch and processes > 1:
        raise TypeError(
            "scaler= is a torch.amp.GradScaler, which checks only the gradients of its own process. Use "
            "gpipe.GradScaler(pipe). [scaler-per-process]"
        )
    if is_of_torch and len({device.type for device in devices}) > 1:
        raise TypeError(
            "scaler= is a torch.amp.GradScaler, which does not support a pipe on accelerators and CPUs. Use "
            "gpipe.GradScaler(pipe). [scaler-on-mixed-devices]"
        )
    return float(
        scaler.scale(torch.ones((), device=scaler_device(devices)))
    )  # This call also initializes the scaler.


def check_numbers(**numbers: object) -> None:
    """Raises a TypeError if an argument is neither a number nor a tensor."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
            raise TypeError(f"{name}={value!r} is not a number. Pass a number.")


def check_loss_fn(loss_fn: object) -> None:
    """Raises a TypeError if a loss function is not callable, or if it is a module class instead of an instance."""
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        name = f"nn.{loss_fn.__name__}" if hasattr(nn, loss_fn.__name__) else loss_fn.__name__
        raise TypeError(f"loss_fn is the class {name}, not a loss. Pass an instance: {name}().")
    if not callable(loss_fn):
        kind = "None" if loss_fn is None else f"a {type(loss_fn).__name__}"
        raise TypeError(
            f"loss_fn is {kind}, not a function. Pass a function of (output, target), such as nn.MSELoss() or "
            f"torch.nn.functional.mse_loss."
        )


def split_alike(micro_batches: int, **trees: Tree) -> tuple[list[int], list[list[Tree]]]:
    """Splits inputs and targets into the same number of non-empty micro-batches.

    `gpipe.MicroBatches` are used without splitting.

    Args:
        micro_batches: The maximum number of micro-batches.
        **trees: The values by argument name. All must have the same number of rows.

    Returns:
        The number of rows of each micro-batch, and the list of micro-batches of each value.

    Raises:
        ValueError: If values have different numbers of rows, or if a value has too many ready-made micro-batches.
        TypeError: If a value cannot be split.
    """
    check_values(**trees)
    inputs = trees["inputs"]
    if MicroBatches in map(type, trees.values()):
        check_ready_made(**{name: _count_parts(tree) for name, tree in trees.items()})
        assert isinstance(inputs, MicroBatches)
        if len(inputs) > micro_batches:
            raise ValueError(
                f"inputs has {len(inputs)} gpipe.MicroBatches, but the pipe has micro_batches={micro_batches}. "
                f"Create the pipe with micro_batches={len(inputs)}, or combine some micro-batches. "
                f"[too-many-micro-batches]"
            )
        parts = [take_parts(tree) for tree in trees.values() if isinstance(tree, MicroBatches)]
        return [count_rows(part, m) for m, part in enumerate(inputs)], parts
    rows = count_rows(inputs)
    count = min(micro_batches, rows)
    parts, errors = [], list[str]()
    for name, tree in trees.items():
        try:
            parts.append(split(tree, rows, count, name, strict=True))
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ValueError("\n".join(errors))
    return rows_of_parts(rows, count), parts


def split_targets(targets: Tree, rows: Sequence[int], *, ready_made: bool) -> list[Tree]:
    """Splits targets into micro-batches with the given numbers of rows, in a process that has no inputs.

    Args:
        targets: The targets, or a `gpipe.MicroBatches` that contains the targets.
        rows: The number of rows of each micro-batch.
        ready_made: Whether the inputs are `gpipe.MicroBatches`.
    """
    check_values(targets=targets)
    check_ready_made(inputs=len(rows) if ready_made else None, targets=_count_parts(targets))
    if isinstance(targets, MicroBatches):
        return take_parts(targets)
    return split(targets, sum(rows), len(rows), "targets", strict=True)


def _count_parts(tree: Tree) -> int | None:
    return len(tree) if isinstance(tree, MicroBatches) else None


def check_ready_made(**counts: int | None) -> None:
    """Raises a ValueError unless all arguments are `gpipe.MicroBatches` of the same length, or no argument is.

    Args:
        **counts: The number of micro-batches of each argument. None for values that gpipe splits.
    """
    if len(set(counts.values())) == 1:
        return
    unsplit = [name for name, count in counts.items() if count is None]
    if unsplit:
        ready_made = [name for name, count in counts.items() if count is not None]
        raise ValueError(
            f"{' and '.join(ready_made)} are gpipe.MicroBatches, but {' and '.join(unsplit)} are not. Pass "
            f"gpipe.MicroBatches for all of them, with one element per micro-batch, or for none. "
            f"[micro-batches-mixed]"
        )
    each = " and ".join(f"{name} has {count}" for name, count in counts.items())
    raise ValueError(
        f"gpipe.MicroBatches differ in length: {each} micro-batches. Pass one target per micro-batch of the inputs. "
        f"[micro-batches-mixed]"
    )


def check_values(**trees: Tree) -> None:
    """Raises a TypeError if a value in these trees can neither be split nor be passed unchanged to the layers."""
    if errors := list(chain.from_iterable(map(find_unsplittable, trees, trees.values()))):
        raise TypeError("\n".join(errors))


def reject_transforms(inputs: Tree) -> None:
    """Rejects `torch.jit` tracing, `torch.export`, and forward-mode differentiation.

    Raises:
        TypeError: If the call is being traced or exported.
        ValueError: If an input has a tangent, because stage boundaries do not support tangents.
    """
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # untyped in torch
    if traced or torch.compiler.is_exporting():
        raise TypeError(NO_GRAPH)
    if not is_differentiated_forward():
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors_in(as_tree(inputs))):
        raise ValueError(
            "inputs: a tensor has a tangent (torch.autograd.forward_ad), but a pipe does not support forward-mode "
            "derivatives. Compute them with the layers outside the pipe. [forward-mode-derivative]"
        )


def reject_gradients_of_inputs(inputs: Tree) -> None:
    """Raises a ValueError if an input of a step requires a gradient."""
    if any(map(attrgetter("requires_grad"), tensors_in(inputs))):
        raise ValueError(
            "inputs: a tensor requires a gradient, but step() does not compute gradients of inputs. Use "
            "loss_fn(pipe(inputs), targets).backward(), or detach the tensor. [input-requires-grad]"
        )
