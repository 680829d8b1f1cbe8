"""Traces a model's forward: it runs once, whole, and every operation is written down.

What else it shows is noted: the losses that it calls, what it leaves behind, on which values its trace may depend.
What cannot be done in parts is refused.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from traceback import walk_stack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gpipe._torch.modes import is_vmapped, saved_tensor_hooks
from gpipe.batch.losses import LossCall, LossReader, read_loss_call
from gpipe.stages.boundary import leaves_of
from gpipe.stages.memory_layout import copy_of, storage_address, version
from gpipe.stages.rng import rng_scope
from gpipe.stages.tree import hides_tensors, tensors_in
from gpipe.tracing.interpreter import RANDOM, SAMPLE_KEY, Interpreter
from gpipe.tracing.meta_model import Dry, lacks_values
from gpipe.tracing.own_loss import loss_in
from gpipe.tracing.parts import Parts
from gpipe.tracing.runs import ForwardArguments, failing_apart, watched
from gpipe.tracing.shallow_copy import ShallowCopy, own_hooks
from gpipe.tracing.slices import tokens_before
from gpipe.tracing.trace import (
    Again,
    CannotSplitError,
    Collected,
    Leaves,
    Op,
    OpCall,
    Structure,
    Trace,
    ValueId,
    is_carried,
    take_apart,
)

UNSEEN = (
    "{name} is given a tensor that was computed between blocks by what torch does not show (a "
    "torch.autograd.Function, torch.utils.checkpoint by use_reentrant=True, torch.func.stack_module_state, a "
    "scripted function), that a block left somewhere, or that was made between blocks and then written into: it "
    "cannot be known which layer is to compute it. Put that code into a module with parameters, have blocks return "
    "what others use, or hooks add it to a list that the forward sets in a contextvars.ContextVar, make what is "
    "written into of what a block gave (x.new_zeros(...)), or name other blocks: blocks=[...]"
)
NOT_CALLED = (
    "none of the blocks ({blocks}) is called in the forward of the {model}: methods or parts of them are used "
    "instead. Name modules that are called: blocks=[...]"
)
SAVES_OTHERWISE = (
    "{name} runs inside of torch.utils.checkpoint, or of other hooks on saved tensors, that the forward puts around "
    "it: what they keep would be of one layer and their recompute of another. Let a block do so inside of it "
    "(gradient_checkpointing_enable() of transformers), or leave it to the pipe, by remat="
)
CHANGES_INPUT = (
    "the forward changes an input of shape {shape}, {dtype}, in place between blocks, and every layer would do "
    "so again; let it work on a clone"
)
REACHES = (
    "{unit} uses {parameter} by a reference, a parameter of a module that blocks stand in: no layer has it, and "
    "several would add to its gradient. Hand it to {unit} as an argument, or put it into a module without blocks"
)
LEAVES_TENSORS = (
    "the forward of the {model} leaves tensors in {places}, where nobody would find them: layers walk through "
    "copies of the modules that blocks stand in. Return them as part of the output"
)
COUNTS = (
    "the forward of the {model} changes {places} each time that it runs, and every layer would do so, again in "
    "each recompute; keep what changes in a module inside of a block, as a buffer, or count outside of the model"
)
DRAWS = (
    "the forward of the {model} draws {what} between blocks, and every layer and micro-batch would draw anew. Layers "
    "that are dropped at random do so (set layerdrop or layer_drop to 0), and masks over speech "
    "(apply_spec_augment=False, or mask_time_prob and mask_feature_prob 0); let anything else draw by torch, or in a "
    "block"
)
KEEPS = (
    "the {model} is given a {kind} ({name}), in which its forward keeps tensors, and layers run apart: each would "
    "keep its own, again in each recompute. Leave it out; to generate, with a cache, call pipe.generate"
)
ONE_ARGUMENT = (
    "the {kind} that was given is one argument of the forward; for several give a dict of those it needs: {names}"
)

SHAPED_BY_VALUES = frozenset(  # functions of torch that give a tensor whose shape depends on values
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave"}
)
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__", "less", "greater"})


class _Known(NamedTuple):
    """How an operation left a tensor."""

    maker: Node | None  # behind it in autograd's graph
    version: int
    wants_gradient: bool


class Tracer(Interpreter):
    """Does every operation and writes it down."""

    def __init__(self, shallow_copy: ShallowCopy, dry: Dry | None = None) -> None:
        super().__init__(shallow_copy, dry)
        self.parts = parts = shallow_copy.parts
        self.losses: list[LossCall] = []
        self.loss_results: list[object] = []  # what these calls returned
        # of values: where, behind how many operations, whether of numbers
        self.reads: list[tuple[str, int, bool]] = []
        self.iterated: set[str] = set()  # sequences whose members are called, and they are not
        self.left = shallow_copy.attributes()
        self._ops: list[Op] = []
        self._starts: list[int] = []
        self._layouts: dict[ValueId, tuple[tuple[int, ...], torch.dtype]] = {}
        self._behind_block = self._blocks_seen = False
        self._scope = rng_scope(0, 0, 0, 0)
        self._raw = {id(parameter): name for name, parameter in parts.model.named_parameters()}
        self._held = {id(buffer): name for name, buffer in parts.model.named_buffers()}
        self._memory = {storage_address(buffer) for buffer in parts.model.buffers()}
        self._owned = {name: frozenset(map(id, unit.parameters())) for name, unit in parts.units.items()}
        self._buffers: set[str] = set()
        self._inputs: dict[int, int] = {}
        self._taken: set[int] = set()
        self._hooks = saved_tensor_hooks()
        self._inner: list[str] = []  # units that the unit that runs has called, or uses parameters of
        self._known: dict[ValueId, _Known] = {}
        # By address, what every layer makes for itself and the operation of one layer changed in place: which layer,
        self._filled: dict[int, tuple[int, Tensor]] = {}  # and the tensor, so that the address stays its own
        self._drawn: set[ValueId] = set()

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Trace]:
        leaves, inputs = take_apart((tuple(args), dict(kwargs)))
        leaves = [copy_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # each known for itself
        carried = [ValueId(-1, at) for at, leaf in enumerate(leaves) if is_carried(leaf)]
        for value_id in carried:
            self._name(leaves[value_id.leaf], value_id)
        whole = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_carried(leaf)]
        versions = list(map(version, whole))
        self._inputs = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        for leaf in whole:
            self._layouts[ValueId(-1, self._inputs[id(leaf)])] = tuple(leaf.shape), leaf.dtype
        given, named = inputs.filled(leaves)
        output = self.run(given, named)
        for leaf, before in zip(whole, versions, strict=True):
            if version(leaf) != before:
                raise CannotSplitError(CHANGES_INPUT.format(shape=tuple(leaf.shape), dtype=leaf.dtype))
        called = {name for op in self._ops if op.is_unit for name in (op.name, *op.inner)}
        raw = {name for op in self._ops for name in op.raw}
        for name, unit in self.parts.units.items():
            is_sequence = name not in called and type(unit).forward is nn.Sequential.forward
            if is_sequence and any(self._raw[one] in raw for one in self._owned[name]):
                self.iterated.add(name)
        if not self._blocks_seen and not self.iterated:
            some, model = ", ".join(sorted(self.parts.blocks)[:3]), type(self.parts.model).__name__
            raise CannotSplitError(
                NOT_CALLED.format(blocks=some, model=model), map(self.parts.caller, self.parts.blocks)
            )
        flat, structure = take_apart(output)
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        self._look(tensors, "the output", len(self._starts) - 1)
        return output, Trace(
            inputs,
            tuple(carried),
            tuple(self._ops),
            tuple(self._starts),
            self._ids_of(tensors),
            structure,
            frozenset(self._buffers),
            frozenset(self._taken),
            self._layouts,
        )

    def free(self, call: OpCall) -> Any:
        self._look(call.tensors, call.name, None)
        made = call.do()
        leaves, _ = take_apart(made)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise CannotSplitError(UNSEEN.format(name=call.name))
        self._note_read(call, leaves)
        return made

    def op(self, call: OpCall) -> Any:
        if is_vmapped():
            raise CannotSplitError(UNSEEN.format(name=call.name))
        if saved_tensor_hooks() != self._hooks:
            raise CannotSplitError(SAVES_OTHERWISE.format(name=call.name))
        layer = self._layer_to_do(call)
        self._look(call.tensors, call.name, layer, is_unit=call.unit is not None)
        uses = self._ids_of(call.tensors)
        raw = tuple(dict.fromkeys(self._raw[id(tensor)] for tensor in call.tensors if id(tensor) in self._raw))
        leaves, returns, again = self._named(call, self._done(call, layer))
        if call.unit is None:
            self._refuse_chance(call, uses, leaves)
            self._note_read(call, leaves)
        inner, self._inner = tuple(dict.fromkeys(self._inner)), []
        self._ops.append(Op(call.name, call.unit is not None, uses, raw, returns, again, inner))
        self.at += 1
        return returns.filled(leaves)

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._in_unit:
            self._inner.append(name)
        return super()._unit(name, args, kwargs)

    def _layer_to_do(self, call: OpCall) -> int:
        """The layer of the operation that begins: one begins with the first, and one behind each block."""
        is_block = call.name in self.parts.blocks and call.unit is not None
        if not self._starts or self._behind_block or (is_block and not self._blocks_seen):
            self._scope = rng_scope(SAMPLE_KEY.seed, SAMPLE_KEY.step, len(self._starts), SAMPLE_KEY.micro_batch)
            self._starts.append(self.at)
        self._behind_block = is_block
        self._blocks_seen = self._blocks_seen or is_block
        return len(self._starts) - 1

    def _ids_of(self, tensors: Sequence[Tensor]) -> frozenset[ValueId]:
        return frozenset(value_id for tensor in tensors if (value_id := self.value_id_of(tensor)) is not None)

    def _look(self, tensors: Sequence[Tensor], name: str, layer: int | None, *, is_unit: bool = False) -> None:
        """Notes which buffers and inputs are used, and refuses what no tracer saw made (`layer` None: for all)."""
        for tensor in tensors:
            if id(tensor) in self._held:
                self._buffers.add(self._held[id(tensor)])
            if id(tensor) in self._inputs and not is_unit:  # a unit may only hand on what it is given
                self._taken.add(self._inputs[id(tensor)])
            value_id = self.value_id_of(tensor)
            is_known = value_id is not None or not self._filled or is_vmapped()
            address = 0 if is_known else storage_address(tensor)
            if (address and self._filled.get(address, (layer,))[0] != layer) or self._is_unseen(tensor, value_id):
                raise CannotSplitError(UNSEEN.format(name=name))

    def _is_unseen(self, tensor: Tensor, value_id: ValueId | None) -> bool:
        """Whether behind a tensor in autograd's graph stands what no operation put there."""
        if value_id is None:
            return tensor.requires_grad and id(tensor) not in self._raw
        known = self._known[value_id]
        if tensor.requires_grad and not known.wants_gradient:
            return True
        return tensor.grad_fn is not known.maker and version(tensor) == known.version

    def _done(self, call: OpCall, layer: int) -> Any:
        """What the operation makes; notes the losses that it calls and the tensors that it changes in place."""
        loss = read_loss_call(call.name, call.args, call.kwargs) if call.unit is None else None
        may_have_loss = call.unit is not None and not self._behind_block
        before = list(map(version, call.tensors))
        behind = {tensor.grad_fn for tensor in call.tensors if tensor.grad_fn is not None}
        reader = LossReader(self.losses)
        with self._scope, reader if may_have_loss else nullcontext():
            made = self.do(call)
        if loss is not None:
            self.losses.append(loss)
        self.loss_results += reader.results if loss is None else [made]
        if call.unit is not None:
            self._inner += self._reached(call, made, behind)
        for tensor, was in zip(call.tensors, before, strict=True):
            if (value_id := self.value_id_of(tensor)) is not None:
                self._note(tensor, value_id)
            elif (  # changed buffers are looked for later
                version(tensor) != was
                and id(tensor) not in self._inputs
                and (address := storage_address(tensor)) not in self._memory
            ):
                self._filled[address] = layer, tensor
        return made

    def _reached(self, call: OpCall, made: Any, until: Collection[Node]) -> list[str]:
        """The other units whose parameters the call of a unit has used; `until` stands behind what it was given."""
        roots = [leaf for leaf in take_apart(made)[0] if isinstance(leaf, Tensor)]
        known = {*self._owned[call.name], *map(id, call.tensors)}
        found: dict[str, None] = {}
        for leaf in leaves_of(roots, until):
            if id(leaf) in self._raw and id(leaf) not in known:
                home = next((name for name, own in self._owned.items() if id(leaf) in own), None)
                if home is None:
                    raise CannotSplitError(REACHES.format(unit=call.name, parameter=self._raw[id(leaf)]))
                found[home] = None
        return list(found)

    def _named(self, call: OpCall, made: Any) -> tuple[Leaves, Structure, Again]:
        """What an operation made, apart, each tensor known by its value id; and which leaves are others again."""
        leaves, returns = take_apart(made)
        known = set(map(id, call.tensors)), self._held, self._raw
        returned = len(take_apart(made.returned)[0]) if isinstance(made, Collected) else len(leaves)
        first: dict[int, ValueId] = {}
        again = {}
        for at, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if at >= returned and (value_id := self.value_id_of(leaf)) is not None:  # what a hook was given, say
                first.setdefault(id(leaf), value_id)
            if first.setdefault(id(leaf), ValueId(self.at, at)) != (self.at, at):
                again[at] = first[id(leaf)]
                continue
            if any(id(leaf) in some for some in known) or self.value_id_of(leaf) is not None:
                leaves[at] = leaf.expand_as(leaf)  # what comes back as it was given need not do so with other inputs
            self._name(leaves[at], ValueId(self.at, at))
        for at, (maker, leaf) in again.items():
            leaves[at] = leaves[leaf] if maker == self.at else leaves[at]
        return leaves, returns, again

    def _name(self, tensor: Tensor, value_id: ValueId) -> None:
        self.name_as(tensor, value_id)
        self._note(tensor, value_id)
        self._layouts[value_id] = tuple(tensor.shape), tensor.dtype

    def _note(self, tensor: Tensor, value_id: ValueId) -> None:
        self._known[value_id] = _Known(tensor.grad_fn, version(tensor), tensor.requires_grad)

    def _note_read(self, call: OpCall, leaves: Sequence[Any]) -> None:
        """Notes an operation of whose values plain values or shapes are made: the trace may depend on them."""
        index = call.args[1:2] if call.name == "__getitem__" else ()
        by_mask = any(getattr(one, "dtype", None) is torch.bool for one in take_apart(index)[0])
        shapes = call.name in SHAPED_BY_VALUES or (call.name == "where" and len(call.args) == 1) or by_mask
        values = [leaf for leaf in leaves if isinstance(leaf, (bool, int, float, np.ndarray))]
        if shapes or values:
            counts = shapes or not all(isinstance(value, bool) for value in values)
            self.reads.append((self.parts.running(frame for frame, _ in walk_stack(None)), self.at, counts))

    def doubtful(self) -> set[str]:
        """The modules that read values and, as it seems, call the blocks inside of them as these say."""
        return {place for place, *_ in self.reads if place and not self._is_steady(place)}

    def _is_steady(self, place: str) -> bool:
        """Whether a module calls all blocks inside of it one behind another, and reads no value in between.

        One that it calls several times is as good as several, unless it reads what may be their number.
        """
        reads = [(at, counts) for where, at, counts in self.reads if where == place]
        inside = {name for name in self.parts.blocks if name.startswith(f"{place}.")}
        calls = [at for at, op in enumerate(self._ops) if op.is_unit and op.name in inside]
        is_one = len(inside) == 1 and (len(calls) == 1 or any(counts for _, counts in reads))
        if is_one or {self._ops[at].name for at in calls} != inside:
            return False
        first, last = calls[0], calls[-1]
        behind = {last}
        for at in range(last, first, -1):  # operations use what earlier ones made
            if at in behind:
                behind |= {value_id.op for value_id in self._ops[at].uses}
        return first in behind and not any(first < at <= last for at, _ in reads)

    def _refuse_chance(self, call: OpCall, uses: frozenset[ValueId], leaves: Leaves) -> None:
        """Refuses to make a plain value of what is drawn, and depends on nothing else."""
        is_drawn = uses <= self._drawn if uses else call.name in RANDOM
        threshold = next((item for item in call.args if isinstance(item, (int, float))), 0.5)
        if not is_drawn or (call.name in COMPARISONS and not 0 < threshold < 1):  # whatever is drawn, it is the same
            return
        if uses and any(isinstance(leaf, (bool, int, float)) for leaf in leaves):
            what = "a random number, by which it goes one way or another,"
            raise CannotSplitError(DRAWS.format(model=type(self.parts.model).__name__, what=what))
        self._drawn |= {ValueId(self.at, at) for at in range(len(leaves))}

    def left_behind(self) -> list[str]:
        """The attributes of copies in which the forward left tensors that would be looked for."""
        return [
            f"{type(self.shallow_copy.copies[name]).__name__}.{key}"
            for name, key, value in self.shallow_copy.changed_since(self.left)
            if (name in self.parts.opened and hides_tensors(value)) or self._ids_of(list(tensors_in(value)))
        ]


class TracerRun(NamedTuple):
    """What one run of a forward has shown; on what the doubtful modules read its path may depend."""

    output: Any
    trace: Trace
    parts: Parts
    losses: list[LossCall]
    doubtful: set[str]


def trace_forward(parts: Parts, given: ForwardArguments) -> TracerRun:
    """The trace, the parts with modules known that keep state without parameters, and the losses that were called."""
    stateful = {name for name, module in parts.copied.items() if own_hooks(module)} - parts.opened
    iterated: set[str] = set()
    dry = Dry() if lacks_values(parts.model) else None
    with nullcontext() if dry is None else dry.faking(parts.model):
        while True:
            parts = Parts(parts.model, parts.blocks, parts.stateful | stateful, parts.iterated | iterated)
            with watched(parts.model) as changed:
                tracer, output, trace = _traced(parts, given, dry)
            closed = {name: module for name, module in parts.copied.items() if name not in parts.opened}
            made = tracer.shallow_copy.copies
            stateful = {
                name
                for name, module in closed.items()
                if any(f"{name}.{leaf}" in changed for leaf in module._buffers)
                or made[name]._buffers.keys() - module._buffers.keys()  # registered in this forward
            }
            iterated = tracer.iterated
            if not stateful and not iterated:
                break
        if dry is None:
            _refuse_leftovers(tracer, given, changed)
    loss, results = loss_in(output), tracer.loss_results
    losses = [call._replace(is_loss=result is loss) for call, result in zip(tracer.losses, results, strict=True)]
    return TracerRun(output, trace, parts, losses, tracer.doubtful())


def _traced(parts: Parts, given: ForwardArguments, dry: Dry | None) -> tuple[Tracer, Any, Trace]:
    tracers: list[Tracer] = []

    def run() -> tuple[Any, Trace]:
        tracers.append(Tracer(ShallowCopy(parts), dry))
        return tracers[-1].trace(*given)

    before = _generators()
    try:
        if dry is None:
            output, trace = failing_apart(parts.model, given, run, lambda: tracers[-1].left_behind())
        else:
            output, trace = run()
    except TypeError as error:
        if given.args and isinstance(given.args[0], (tuple, list)):
            names = ", ".join(signature(parts.model.forward).parameters)
            error.add_note(ONE_ARGUMENT.format(kind=type(given.args[0]).__name__, names=names))
        raise
    model = type(parts.model).__name__
    for name, value in (*enumerate(given.args), *given.kwargs.items()):
        for leaf in take_apart(value)[0]:
            if not isinstance(leaf, Tensor) and tokens_before(leaf) is None and hides_tensors(leaf):
                raise CannotSplitError(KEEPS.format(model=model, kind=type(leaf).__name__, name=name))
    if left := tracers[-1].left_behind():
        raise CannotSplitError(LEAVES_TENSORS.format(model=model, places=", ".join(left)))
    for whose, state in _generators().items():
        if state != before[whose]:
            raise CannotSplitError(DRAWS.format(model=model, what=f"from {whose} generator"))
    return tracers[-1], output, trace


def _refuse_leftovers(tracer: Tracer, given: ForwardArguments, written: Collection[str]) -> None:
    """Rejects state that differs after each forward, and `written` buffers of modules that every layer reads."""
    shallow_copy = tracer.shallow_copy
    shallow_copy.refuse_changed_buffers(written)
    if [*shallow_copy.changed_since(tracer.left)]:
        once = shallow_copy.attributes()
        with watched(tracer.parts.model):
            given.call(shallow_copy.root)
        if counts := [*shallow_copy.changed_since(once)]:
            places = [f"{type(shallow_copy.copies[name]).__name__}.{key}" for name, key, _ in counts]
            text = COUNTS.format(model=type(tracer.parts.model).__name__, places=", ".join(places))
            raise CannotSplitError(text, [name for name, _, _ in counts])


def _generators() -> dict[str, object]:
    return {
        "Python's": random.getstate(),
        "numpy's": str(np.random.get_state()),
        "torch's": torch.default_generator.get_state().tolist(),
    }
