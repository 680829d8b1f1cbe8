"""Rejects unknown arguments of `GPipe`, `step` and calls, and suggests the correct arguments."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import ParamSpec, TypeVar

from gpipe.errors import hide_internal_frames

P = ParamSpec("P")
R = TypeVar("R")

MICRO_BATCHES = "Use micro_batches=<number of micro-batches>"
NOT_ROWS = "Use micro_batches=<number of micro-batches>, not the number of rows in each"
POSITIONAL = "Pass the mini-batch by position: pipe(x) or pipe.step(x, targets, loss_fn)"
MIXED = (
    "The mini-batch was passed both by position and by name ({names}). Pass all arguments of the model by name, or "
    "all of them in one dict."
)
FIXES = {
    "chunks": MICRO_BATCHES,
    "n_microbatches": MICRO_BATCHES,
    "micro_batch_size": NOT_ROWS,
    "batch_size": NOT_ROWS,
    "num_stages": "Use partitions=",
    "num_partitions": "Use partitions=",
    "checkpoint": "Use remat='always', 'except_last', 'never', or the number of micro-batches that keep activations",
    "layers": "Use model=",
    "balance": "Use partitions=[<layers of each stage>, ...], or plan=gpipe.find_plan(..., balance='minmax')",
    "costs": "Use plan=gpipe.find_plan(..., costs=...)",
    "blocks": "Pass gpipe.layers_of(model, sample, blocks=[...]) instead of the model",
    "stages_per_rank": "Use schedule=gpipe.Interleaved(stages)",
    "slices": "Use schedule=gpipe.Sliced(schedule, slices)",
    "memory": "Use remat=gpipe.Remat(memory=...)",
    "deferred_batch_norm": "Use batch_norm='deferred'",
    "sync_batch_norm": "Use batch_norm='synchronized'",
    "intra_op_threads": "Use driver=gpipe.Threads(intra_op_threads=...)",
    "survive": "Use driver=gpipe.Processes(survive=True)",
    "verify": "Set pipe.verify_steps = False after you have created the pipe",
    "device_mesh": "Use mesh=, a DeviceMesh with a dimension 'pp'",
    "loss_fn": "Pass the loss function to each step: pipe.step(inputs, targets, loss_fn)",
    "criterion": "Pass loss_fn= to each step",
    "optimizer": "Create an optimizer of pipe.parameters(), and call optimizer.step() after pipe.step(...)",
    "inputs": POSITIONAL,
    "x": POSITIONAL,
    "input_ids": "Pass the batch as one dict: pipe.step(batch)",
    "mask": "Pass one value: pipe({'x': x, 'mask': mask})",
    "labels": "Pass targets= to each step",
    "targets": "Pass the targets to step: pipe.step(inputs, targets, loss_fn)",
}
"""The fix for each argument name that belongs to a different library or a different function of gpipe."""
TOO_MANY = {
    "__init__": "Pass all layers in one list: GPipe([layer, layer, ...], partitions, micro_batches). Pass other "
    "arguments by name.",
    "verify": "verify() accepts (inputs, targets, loss_fn) by position. Pass other arguments by name.",
    "step": "step() accepts (inputs, targets, loss_fn) by position. Pass other arguments by name, and several inputs "
    "as a tuple or dict.",
    "forward": "A pipe takes one value, the input of its first layer. Pass several values as a tuple, pipe((x, "
    "mask)), or a dict.",
}


def checked_entrance(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function so that calls with unknown or too many arguments raise a helpful error."""
    return hide_internal_frames(function, partial(_explain, function))


def _explain(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """Returns a message for arguments that a function does not accept, or None to keep Python's message."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY and p.name != "self"]
    if unknown := [name for name in kwargs if name not in known]:
        return _reject(function.__name__, unknown, known)
    positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return TOO_MANY[function.__name__] if len(args) > positional else None


def check_names(batch: Mapping[str, object], *, is_model: bool, has_inputs: bool) -> None:
    """Rejects keyword arguments of a call, unless the pipe runs a model and has no positional input.

    Args:
        batch: The keyword arguments.
        is_model: Whether the pipe runs a model, whose forward accepts keyword arguments.
        has_inputs: Whether the call also has a positional mini-batch.
    """
    if not is_model:
        raise TypeError(_reject("forward", batch, ["gather"]))
    if has_inputs:
        raise TypeError(MIXED.format(names=", ".join(f"{name}=" for name in batch)))


def _reject(function: str, unknown: Collection[str], known: Sequence[str]) -> str:
    """Returns one line for each unknown argument, and the list of known arguments unless `FIXES` has all fixes."""
    callee = {"__init__": "GPipe", "forward": "pipe"}.get(function, function)
    lines = [
        f"{callee}() got an unexpected keyword argument {name!r}. {_suggest(function, name, known)}."
        for name in unknown
    ]
    if not all(name in FIXES for name in unknown):
        lines.append(f"Known arguments: {', '.join(known)}.")
    return "\n".join(lines)


def _suggest(function: str, name: str, known: Sequence[str]) -> str:
    """Returns a fix for an unknown argument name: from `FIXES`, or the known argument with the closest spelling."""
    if name not in FIXES:
        close = get_close_matches(name, [*known, *FIXES], 1)
        if not close:
            return "Remove it"
        if close[0] in known:
            return f"Use {close[0]}="
        name = close[0]
    fix = FIXES[name]
    is_for_constructor = function != "__init__" and fix.startswith("Use ")
    return f"In GPipe(...), u{fix[1:]}" if is_for_constructor else fix
