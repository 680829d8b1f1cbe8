"""Traces a forward: it runs once, whole, and its path, its losses and what it leaves behind are noted."""

import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gpipe.layers.stage import RngKey
from gpipe.recording.arguments import Given, names_taken
from gpipe.recording.leftovers import LEAVES_TENSORS, refuse_failing_apart, refuse_kept
from gpipe.recording.loss_calls import LossCall
from gpipe.recording.recorder import Recorder
from gpipe.recording.runs import copied, watched
from gpipe.replay.dry import Dry, lacks_values
from gpipe.replay.errors import CannotSplitError
from gpipe.replay.path import Path
from gpipe.replay.skeleton import Parts
from gpipe.rng.visit import visit
from gpipe.torch_private.modules import hooks_of

KEY = RngKey(0, 0, 0)
"""When a sample is, for its random numbers."""
DRAWS = (
    "the forward of the {model} draws from {whose} generator between blocks, and every layer would draw anew. Layers "
    "that are dropped at random do so (set layerdrop or layer_drop to 0), and masks over speech "
    "(apply_spec_augment=False, or mask_time_prob and mask_feature_prob 0); let anything else draw by torch, or in a "
    "block"
)
ON_SAMPLE = (
    "while the {model} ran, whole, to be recorded: on the sample, or on the first mini-batch of another kind; "
    "give what model(...) takes: a dict for keywords, anything else for its one argument"
)
ONE_ARGUMENT = (
    "the {kind} that was given is one argument of the forward; for several give a dict, with those of these keys "
    "that it needs: {names}"
)
WRITES_BUFFER = (
    "the forward of the {model} writes the buffer {name} between blocks, and every layer would do so; let a "
    "module inside of a block have it, or one of its own that is called"
)


class Traced(NamedTuple):
    """What one run of a forward has shown."""

    output: Any
    path: Path
    parts: Parts
    losses: list[LossCall]


def trace(parts: Parts, given: Given) -> Traced:
    """The path, the parts with modules known that keep state without parameters, and the losses that were called."""
    hooked = {name for name, module in parts.skeleton().walked.items() if hooks_of(module)} - parts.opened
    parts = replace(parts, stateful=parts.stateful | hooked)
    dry = Dry() if lacks_values(parts.model) else None
    faking = nullcontext() if dry is None else dry.faking(parts.model)
    with faking:
        found, stateful = _traced(parts, given, dry)
    return trace(replace(parts, stateful=parts.stateful | stateful), given) if stateful else found


def _traced(parts: Parts, given: Given, dry: Dry | None) -> tuple[Traced, set[str]]:
    visits: dict[int, visit] = {}

    def around(layer: int) -> visit:
        if layer not in visits:
            visits[layer] = visit(KEY.seed, KEY.step, layer, KEY.micro_batch)
        return visits[layer]

    skeleton = parts.skeleton()
    skeleton.refresh()
    recorder = Recorder(skeleton, parts.model, parts.blocks, around, dry)
    before = _generators()
    try:
        (output, path), changed = watched(parts.model, lambda: recorder.record(*given))
    except CannotSplitError:
        raise
    except Exception as error:
        if dry is None and _runs(parts.model, given):
            refuse_failing_apart(parts.model, error, recorder.left_behind())
        error.add_note(ON_SAMPLE.format(model=type(parts.model).__name__))
        if isinstance(error, TypeError) and given.args and isinstance(given.args[0], (tuple, list)):
            error.add_note(ONE_ARGUMENT.format(kind=type(given.args[0]).__name__, names=names_taken(parts.model)))
        raise
    refuse_kept(parts.model, given)
    if left := recorder.left_behind():
        raise CannotSplitError(LEAVES_TENSORS.format(model=type(parts.model).__name__, places=", ".join(left)))
    for whose, state in _generators().items():
        if not _same(before[whose], state):
            raise CannotSplitError(DRAWS.format(model=type(parts.model).__name__, whose=whose))
    apart = {part for unit in skeleton.units.values() for part in unit.modules()}
    stateful = set()
    for name, module in parts.model.named_modules():
        for leaf in module._buffers if module not in apart else ():
            buffer = f"{name}.{leaf}" if name else leaf
            if buffer in changed:
                if name in parts.opened:
                    raise CannotSplitError(WRITES_BUFFER.format(model=type(parts.model).__name__, name=buffer))
                stateful.add(name)
    return Traced(output, path, parts, recorder.losses), stateful


def _runs(model: nn.Module, given: Given) -> bool:
    """Whether a model by itself takes the sample."""
    try:
        watched(model, lambda: model(*copied(given.args), **copied(given.kwargs)))
    except Exception:
        return False
    return True


def _generators() -> dict[str, Any]:
    return {
        "Python's": random.getstate(),
        "numpy's": np.random.get_state(),
        "torch's": torch.default_generator.get_state(),
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    return bool(np.all(one == other))
