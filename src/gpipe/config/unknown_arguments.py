"""Refuses unknown arguments of `GPipe`, `step` and a call: names what to write instead of other libraries' words."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import ParamSpec, TypeVar

from gpipe.errors import entrance

P = ParamSpec("P")
R = TypeVar("R")

HOW_MANY = "micro_batches= of GPipe, how many, not how many rows each has"
NO_NAME = "the mini-batch without a name: pipe(x), or pipe.step(x, targets, loss_fn)"
BESIDE_INPUTS = (
    "a call of the pipe got a mini-batch without a name and also {names}. Pass all arguments of the model by name, "
    "or all of them in one dict"
)
WORDS = {
    "chunks": "micro_batches= of GPipe, how many",
    "n_microbatches": "micro_batches= of GPipe, how many",
    "micro_batch_size": HOW_MANY,
    "batch_size": HOW_MANY,
    "num_stages": "partitions=",
    "num_partitions": "partitions=",
    "checkpoint": "remat='always', 'except_last', 'never' or how many micro-batches at once keep what is inside",
    "layers": "model=",
    "balance": "the layers of each stage as partitions=[...]; or plan=gpipe.find_plan(..., balance='minmax')",
    "costs": "plan=gpipe.find_plan(..., costs=...)",
    "blocks": "gpipe.layers_of(model, sample, blocks=[...]) in place of the model",
    "stages_per_rank": "schedule=gpipe.Interleaved(stages)",
    "slices": "schedule=gpipe.Sliced(schedule, slices)",
    "memory": "remat=gpipe.Remat(memory=...)",
    "deferred_batch_norm": "batch_norm='deferred'",
    "sync_batch_norm": "batch_norm='synchronized'",
    "intra_op_threads": "driver=gpipe.Threads(intra_op_threads=...)",
    "survive": "driver=gpipe.Processes(survive=True)",
    "verify": "pipe.verify_steps = False once the pipe is built",
    "device_mesh": "mesh=, a DeviceMesh with a dimension 'pp'",
    "loss_fn": "to each step: pipe.step(inputs, targets, loss_fn)",
    "criterion": "loss_fn= to each step",
    "optimizer": "none: make your own over pipe.parameters(), and step it after pipe.step(...)",
    "inputs": NO_NAME,
    "x": NO_NAME,
    "input_ids": "all of the batch as one dict: pipe.step(batch)",
    "mask": "one value: pipe({'x': x, 'mask': mask})",
    "labels": "targets= to each step",
    "targets": "it to pipe.step(inputs, targets, loss_fn)",
}
"""Words of other libraries, and of other entrances of a pipe."""
TOO_MANY = {
    "__init__": "give the layers as one: GPipe([layer, layer, ...], partitions, micro_batches), the rest by name",
    "verify": "verify() takes (inputs, targets, loss_fn) by position. Pass the other arguments by name",
    "step": "step takes (inputs, targets, loss_fn), the rest by name; several inputs are a tuple or a dict",
    "forward": "a pipe takes one value, as its first layer does; give several as a tuple, pipe((x, mask)), or a dict",
}


def checked_entrance(function: Callable[P, R]) -> Callable[P, R]:
    """An `entrance` that gives our word for each unknown keyword, and says what to do with too many values."""
    return entrance(function, partial(_explain, function))


def _explain(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """What is wrong with arguments that a function does not take; None: Python says it as well."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    if unknown := [word for word in kwargs if word not in known]:
        return _instead_of(unknown, known)
    positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return TOO_MANY[function.__name__] if len(args) > positional else None


def check_names(batch: Mapping[str, object], *, is_model: bool, has_inputs: bool) -> None:
    """Rejects arguments by name in a call of a pipe of layers, and beside a mini-batch in a call of a model."""
    if not is_model:
        raise TypeError(_instead_of(batch, ["gather"]))
    if has_inputs:
        raise TypeError(BESIDE_INPUTS.format(names=", ".join(f"{name}=" for name in batch)))


def _instead_of(unknown: Collection[str], known: Sequence[str]) -> str:
    found = [f"there is no {word}=; {_instead(word, known)}" for word in unknown]
    if not all(word in WORDS for word in unknown):
        found.append(f"known are {', '.join(name for name in known if name != 'self')}")
    return "\n".join(found)


def _instead(word: str, known: Sequence[str]) -> str:
    close = [word] if word in WORDS else get_close_matches(word, [*known, *WORDS], 1)
    if not close:
        return "leave it out"
    return f"give {close[0]}=" if close[0] in known else f"give {WORDS[close[0]]}"
