"""Traces a model's forward: it runs once, whole, and every operation is written down.

What else it shows is noted: the losses that it calls, what it leaves behind, on which values its trace may depend.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gpipe._torch.modes import is_vmapped, saved_tensor_hooks
from gpipe._torch.modules import hooks_of
from gpipe._torch.trees import tree_leaves
from gpipe.stages.layout import copy_of
from gpipe.stages.losses import LossCall, LossReader, read_loss_call
from gpipe.stages.rng import rng_scope
from gpipe.stages.stage import RngKey
from gpipe.stages.tree import version
from gpipe.tracing.blocks import open_names
from gpipe.tracing.checks import (
    LEAVES_TENSORS,
    Chance,
    Fillings,
    Makers,
    Owners,
    SharedMemory,
    refuse_failing_apart,
    refuse_kept,
)
from gpipe.tracing.interpreter import RANDOM, Interpreter
from gpipe.tracing.meta_model import Dry, lacks_values
from gpipe.tracing.runs import ForwardArguments, names_taken, watched
from gpipe.tracing.shallow_copy import Parts, ShallowCopy
from gpipe.tracing.trace import Op, OpCall, Trace
from gpipe.tracing.values import Again, CannotSplitError, Leaves, Structure, ValueId, again_in, is_carried, take_apart

UNSEEN = (
    "{name} is given a tensor that was computed between blocks by what torch does not show (a "
    "torch.autograd.Function, torch.utils.checkpoint by use_reentrant=True, torch.func.stack_module_state, a "
    "scripted function), that a block left somewhere, or that was made between blocks and then written into: it "
    "cannot be known which layer is to compute it. Put that code into a module with parameters, have blocks return "
    "what others use, or name other blocks: blocks=[...]"
)
NOT_CALLED = (
    "none of the blocks ({blocks}) is called in the forward of the {model}: methods or parts of them are used "
    "instead. Name modules that are called: blocks=[...]"
)
HOOKED = (
    "{name} runs inside of torch.utils.checkpoint, or of other hooks on saved tensors, that the forward puts around "
    "it: what they keep would be of one layer and their recompute of another. Let a block do so inside of it "
    "(gradient_checkpointing_enable() of transformers), or leave it to the pipe, by remat="
)
CHANGES_INPUT = (
    "the forward changes an input of shape {shape}, {dtype}, in place between blocks, and every layer would do "
    "so again; let it work on a clone"
)


SHAPED_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave"}
)
"""Functions of torch that give a tensor whose shape depends on values."""


class Tracer(Interpreter):
    """Does every operation and writes it down.

    Args:
        shallow copy: What is interpreted.
        model: The model that it was made of.
        blocks: The names of its blocks.
        around: What is entered around the operations of a layer, by its number.
        dry: Does the operations of a model without values.
    """

    def __init__(
        self,
        shallow_copy: ShallowCopy,
        model: nn.Module,
        blocks: Sequence[str],
        around: Callable[[int], AbstractContextManager[object]] = lambda layer: nullcontext(),
        dry: Dry | None = None,
    ) -> None:
        super().__init__(shallow_copy, dry)
        self.ops: list[Op] = []
        self.starts: list[int] = []
        self.losses: list[LossCall] = []
        self.reads = ""
        self.layouts: dict[ValueId, tuple[tuple[int, ...], Any]] = {}
        self._around = around
        self._blocks = frozenset(blocks)
        self._opened = open_names(blocks)
        self._begins_layer = True
        self._blocks_seen = False
        self._raw = {id(parameter): name for name, parameter in model.named_parameters()}
        self._held = {id(buffer): name for name, buffer in model.named_buffers()}
        self._buffers: set[str] = set()
        self._taken: set[int] = set()
        self._inputs: dict[int, int] = {}
        self._hooks = saved_tensor_hooks()
        self._inner: list[str] = []  # units that the unit that runs has called, or uses parameters of
        self._owners = Owners(model, shallow_copy.units)
        self._chance = Chance(model, shallow_copy.copied_modules)
        self._makers, self._shared, self._filled = Makers(), SharedMemory(), Fillings(self.value_id_of)

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Trace]:
        """Runs the forward; gives its output, and the trace that it took.

        Raises:
            CannotSplitError: It does what cannot be done in parts.
        """
        leaves, inputs = take_apart((tuple(args), dict(kwargs)))
        leaves = [copy_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # each known for itself
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._inputs[id(leaf)] = at
                if is_carried(leaf):
                    self._note(leaf, ValueId(-1, at))
        again, named = inputs.filled(leaves)
        versions = [version(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        output = self.run(again, named)
        self._refuse_changed_inputs(leaves, versions)
        if not self._blocks_seen:
            some = ", ".join(sorted(self._blocks)[:3])
            raise CannotSplitError(NOT_CALLED.format(blocks=some, model=type(self.shallow_copy.root).__name__))
        flat, structure = take_apart(output)
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        self._filled.refuse_elsewhere(tensors, "the output", self._layer)
        self._look(tensors, "the output")
        results = frozenset(
            value_id for leaf in flat if isinstance(leaf, Tensor) and (value_id := self.value_id_of(leaf)) is not None
        )
        trace = Trace(
            inputs,
            tuple(ValueId(-1, at) for at, leaf in enumerate(leaves) if is_carried(leaf)),
            tuple(self.ops),
            tuple(self.starts),
            results,
            structure,
            frozenset(self._buffers),
            frozenset(self._taken),
            self.layouts,
        )
        self._shared.refuse_parted(trace)
        return output, trace

    @property
    def _layer(self) -> int:
        return len(self.starts) - 1

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._in_unit:
            self._inner.append(name)
        return super()._unit(name, args, kwargs)

    def free(self, call: OpCall) -> Any:
        """Does an operation that every layer does for itself."""
        self._look(call.tensors, call.name)
        made = call.do()
        leaves, _ = take_apart(made)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise CannotSplitError(UNSEEN.format(name=call.name))
        self._filled.spread(call.tensors, call.name, leaves)
        self._note_read(call, ())
        return made

    def _look(self, tensors: Sequence[Tensor], name: str, *, is_unit: bool = False) -> None:
        """Notes which buffers and inputs are used, and refuses what was made where no tracer sees it.

        A unit may only hand on what it is given.
        """
        self._buffers.update(self._held[id(tensor)] for tensor in tensors if id(tensor) in self._held)
        if not is_unit:
            self._taken.update(self._inputs[id(tensor)] for tensor in tensors if id(tensor) in self._inputs)
        if any(map(self._is_unseen, tensors)):
            raise CannotSplitError(UNSEEN.format(name=name))

    def left_behind(self) -> list[str]:
        """The attributes of copies in which the forward left what operations made."""
        return [
            f"{type(copy).__name__}.{key}"
            for name, copy in self.shallow_copy.copies.items()
            for key, value in vars(copy).items()
            if not (key == "_buffers" and name in self._opened)  # which the model itself shows
            and any(isinstance(leaf, Tensor) and self.value_id_of(leaf) is not None for leaf in tree_leaves(value))
        ]

    def op(self, call: OpCall) -> Any:
        """Does an operation and writes it down."""
        self._refuse_surroundings(call)
        self._begin_layer(call)
        self._filled.refuse_elsewhere(call.tensors, call.name, self._layer)
        self._look(call.tensors, call.name, is_unit=call.unit is not None)
        uses = frozenset(value_id for tensor in call.tensors if (value_id := self.value_id_of(tensor)) is not None)
        raw = tuple(dict.fromkeys(self._raw[id(t)] for t in call.tensors if id(t) in self._raw))
        leaves, returns, again = self._named(call, self._done(call))
        if call.unit is None:
            made = {ValueId(self.at, at): leaf for at, leaf in enumerate(leaves)}
            self._chance.see(call.name, call.args, uses, made, draws=call.name in RANDOM)
            self._note_read(call, leaves)
        inner, self._inner = tuple(dict.fromkeys(self._inner)), []
        self.ops.append(Op(call.name, call.unit is not None, uses, raw, returns, again, inner))
        self.at += 1
        return returns.filled(leaves)

    def _note_read(self, call: OpCall, leaves: Sequence[Any]) -> None:
        """Notes an operation of whose values plain values or shapes are made: the trace may depend on them."""
        index = call.args[1:2] if call.name == "__getitem__" else ()
        by_mask = any(getattr(one, "dtype", None) is torch.bool for one in take_apart(index)[0])
        shapes = call.name in SHAPED_BY_VALUES or (call.name == "where" and len(call.args) == 1) or by_mask
        if shapes or any(isinstance(leaf, (bool, int, float)) for leaf in leaves):
            self.reads = call.name

    def _refuse_surroundings(self, call: OpCall) -> None:
        if is_vmapped():
            raise CannotSplitError(UNSEEN.format(name=call.name))
        if saved_tensor_hooks() != self._hooks:
            raise CannotSplitError(HOOKED.format(name=call.name))

    def _is_block(self, call: OpCall) -> bool:
        return call.unit is not None and call.name in self._blocks

    def _begin_layer(self, call: OpCall) -> None:
        """Begins a layer behind each block, and with the first."""
        is_block = self._is_block(call)
        if self._begins_layer or (is_block and not self._blocks_seen):
            self.starts.append(self.at)
        self._begins_layer = is_block
        self._blocks_seen = self._blocks_seen or is_block

    def _done(self, call: OpCall) -> Any:
        """What the operation makes; notes the losses that it calls and the tensors that it changes in place."""
        if call.unit is None and (loss := read_loss_call(call.name, call.args, call.kwargs)) is not None:
            self.losses.append(loss)
        has_head = call.unit is not None and not self._is_block(call)  # which may have the loss
        before = [version(tensor) for tensor in call.tensors]
        behind = {tensor.grad_fn for tensor in call.tensors if tensor.grad_fn is not None}
        with self._around(self._layer), LossReader(self.losses) if has_head else nullcontext():
            made = self.do(call)
        if call.unit is not None:
            self._inner += self._owners.reached(call, made, behind)
        for tensor, was in zip(call.tensors, before, strict=True):
            self._note_given(tensor, call.name, is_changed=version(tensor) != was)
        return made

    def _note_given(self, tensor: Tensor, name: str, *, is_changed: bool) -> None:
        """Notes that an operation was given a tensor, and perhaps changed it in place."""
        value_id = self.value_id_of(tensor)
        if value_id is not None:
            self._makers.note(value_id, tensor)
            if is_changed:
                self._shared.note_change(self.at, value_id)
        elif is_changed and id(tensor) not in self._inputs and id(tensor) not in self._held:
            self._filled.note(tensor, name, self._layer)

    def _named(self, call: OpCall, made: Any) -> tuple[Leaves, Structure, Again]:
        """What an operation made, apart, each tensor known by its value id; and which leaves are others again."""
        leaves, returns = take_apart(made)
        given = set(map(id, call.tensors))
        again = again_in(leaves)
        leaves = [self._known_apart(leaf, given) for leaf in leaves]
        for at, first in again:
            leaves[at] = leaves[first]
        for at, leaf in reversed([*enumerate(leaves)]):  # what stands there again is known by its first place
            if isinstance(leaf, Tensor):
                self._note(leaf, ValueId(self.at, at))
        return leaves, returns, again

    def _is_unseen(self, tensor: Tensor) -> bool:
        """Whether behind a tensor in autograd's graph stands what no operation put there."""
        value_id = self.value_id_of(tensor)
        if value_id is None:
            return tensor.requires_grad and id(tensor) not in self._raw
        return self._makers.differ(value_id, tensor)

    def _known_apart(self, leaf: Any, given: Collection[int]) -> Any:
        """A tensor that has no name yet: what comes back as it was given need not be that with other inputs."""
        if not isinstance(leaf, Tensor):
            return leaf
        is_known = id(leaf) in given or id(leaf) in self._held or id(leaf) in self._raw
        return leaf.expand_as(leaf) if is_known or self.value_id_of(leaf) is not None else leaf

    def _refuse_changed_inputs(self, leaves: Leaves, versions: Sequence[int]) -> None:
        """Refuses changes in place of what every layer is given."""
        for leaf, before in zip(leaves, versions, strict=True):
            if isinstance(leaf, Tensor) and not is_carried(leaf) and version(leaf) != before:
                raise CannotSplitError(CHANGES_INPUT.format(shape=tuple(leaf.shape), dtype=leaf.dtype))

    def _note(self, tensor: Tensor, value_id: ValueId) -> None:
        self.name_as(tensor, value_id)
        self._makers.note(value_id, tensor)
        self._shared.note(value_id, tensor)
        self.layouts[value_id] = tuple(tensor.shape), tensor.dtype


SAMPLE_KEY = RngKey(0, 0, 0)
"""When a sample is, for its random numbers."""
DRAWS = (
    "the forward of the {model} draws from {whose} generator between blocks, and every layer would draw anew. Layers "
    "that are dropped at random do so (set layerdrop or layer_drop to 0), and masks over speech "
    "(apply_spec_augment=False, or mask_time_prob and mask_feature_prob 0); let anything else draw by torch, or in a "
    "block"
)
ONE_ARGUMENT = (
    "the {kind} that was given is one argument of the forward; for several give a dict, with those of these keys "
    "that it needs: {names}"
)
WRITES_BUFFER = (
    "the forward of the {model} writes the buffer {name} between blocks, and every layer would do so; let a "
    "module inside of a block have it, or one of its own that is called, or name a module around it as a block: "
    "blocks=[...]"
)


class TracerRun(NamedTuple):
    """What one run of a forward has shown; `reads` is an operation between blocks on which its path may depend."""

    output: Any
    trace: Trace
    parts: Parts
    losses: list[LossCall]
    reads: str


def trace_forward(parts: Parts, given: ForwardArguments) -> TracerRun:
    """The trace, the parts with modules known that keep state without parameters, and the losses that were called."""
    hooked = {name for name, module in parts.shallow_copy().copied_modules.items() if hooks_of(module)} - parts.opened
    parts = replace(parts, stateful=parts.stateful | hooked)
    dry = Dry() if lacks_values(parts.model) else None
    faking = nullcontext() if dry is None else dry.faking(parts.model)
    with faking:
        found, stateful = _traced(parts, given, dry)
    return trace_forward(replace(parts, stateful=parts.stateful | stateful), given) if stateful else found


def _traced(
    parts: Parts, given: ForwardArguments, dry: Dry | None, *, again: bool = False
) -> tuple[TracerRun, set[str]]:
    scopes: dict[int, rng_scope] = {}

    def around(layer: int) -> rng_scope:
        if layer not in scopes:
            scopes[layer] = rng_scope(SAMPLE_KEY.seed, SAMPLE_KEY.step, layer, SAMPLE_KEY.micro_batch)
        return scopes[layer]

    shallow_copy = parts.shallow_copy()
    shallow_copy.refresh()
    tracer = Tracer(shallow_copy, parts.model, parts.blocks, around, dry)
    before = _generators()
    try:
        (output, trace), changed = watched(parts.model, lambda: tracer.trace(*given))
    except Exception as error:
        if dry is None and not again:
            run_apart = partial(_traced, parts, given, dry, again=True)
            refuse_failing_apart(parts.model, given, error, run_apart, tracer.left_behind())
        if isinstance(error, TypeError) and given.args and isinstance(given.args[0], (tuple, list)):
            error.add_note(ONE_ARGUMENT.format(kind=type(given.args[0]).__name__, names=names_taken(parts.model)))
        raise
    refuse_kept(parts.model, given)
    if left := tracer.left_behind():
        raise CannotSplitError(LEAVES_TENSORS.format(model=type(parts.model).__name__, places=", ".join(left)))
    for whose, state in _generators().items():
        if not _same(before[whose], state):
            raise CannotSplitError(DRAWS.format(model=type(parts.model).__name__, whose=whose))
    apart = {part for unit in shallow_copy.units.values() for part in unit.modules()}
    stateful = set()
    for name, module in parts.model.named_modules():
        for leaf in module._buffers if module not in apart else ():
            buffer = f"{name}.{leaf}" if name else leaf
            if buffer in changed:
                if name in parts.opened:
                    raise CannotSplitError(WRITES_BUFFER.format(model=type(parts.model).__name__, name=buffer))
                stateful.add(name)
    return TracerRun(output, trace, parts, tracer.losses, tracer.reads), stateful


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
