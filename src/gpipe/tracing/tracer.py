"""Traces a model's forward: runs the unsplit forward once, and records every operation.

The tracer also records the losses that the forward calls, the tensors that the forward stores on modules, and the
values on which the control-flow path may depend. The tracer raises an error if the forward cannot be split.
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
from gpipe.tracing.meta_model import DryRun, lacks_values
from gpipe.tracing.own_loss import loss_in
from gpipe.tracing.parts import Parts
from gpipe.tracing.runs import ForwardArguments, run_split, watched
from gpipe.tracing.shallow_copy import ShallowCopy, own_hooks
from gpipe.tracing.slices import tokens_before
from gpipe.tracing.trace import (
    CannotSplitError,
    Collected,
    Leaves,
    Op,
    OpCall,
    Repeated,
    Structure,
    Trace,
    ValueId,
    is_carried,
    take_apart,
)

UNSEEN = (
    "{name}: an argument was computed between blocks by code that gpipe cannot trace, such as a "
    "torch.autograd.Function. Move that code into a module with parameters, or create the tensor from a block's "
    "output (x.new_zeros(...)). [untraceable-tensor]"
)
SAVED_TENSOR_HOOKS = (
    "{name}: the forward calls this module or function inside torch.utils.checkpoint, or inside other hooks on saved "
    "tensors, which would span several layers. Use checkpointing inside blocks (gradient_checkpointing_enable() in "
    "transformers), or pass remat= to the pipe instead. [checkpoint-around-blocks]"
)
CHANGES_INPUT = (
    "The forward changes an input of shape {shape} and dtype {dtype} in place between blocks, and every layer would "
    "change it again. Change a clone instead. [inplace-on-input]"
)
BY_REFERENCE = (
    "{unit} uses {parameter} by a reference, but {parameter} belongs to a module that contains blocks. Pass it to "
    "{unit} as an argument, or move it into a module without blocks. [parameter-by-reference]"
)
CHANGES_STATE = (
    "The forward of {model} changes {places} each time it runs, so every layer and recomputation would change it "
    "again. Keep this state in a buffer inside a block, or outside the model. [state-between-blocks]"
)
RANDOM_VALUE = (
    "The forward of {model} uses a random number as a Python value between blocks. Set layerdrop or layer_drop to 0, "
    "set apply_spec_augment=False, or use random numbers only inside blocks. [random-between-blocks]"
)
OTHER_GENERATOR = (
    "The forward of {model} uses {generator} random generator between blocks. Set layerdrop or layer_drop to 0, set "
    "apply_spec_augment=False, or use random functions of torch. [random-between-blocks]"
)

SHAPED_BY_VALUES = frozenset(  # functions of torch whose output shape depends on values
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave"}
)
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__", "less", "greater"})


class _AutogradState(NamedTuple):
    """The autograd state of a tensor after the operation that returned it."""

    grad_fn: Node | None
    version: int
    requires_grad: bool


class _ValueRead(NamedTuple):
    """An operation whose result became a Python value or a shape, so that the control-flow path may depend on it."""

    module: str  # whose code ran; "" is the model
    op_index: int
    is_number: bool  # or a shape; otherwise only booleans


class Tracer(Interpreter):
    """Executes every operation and records it.

    Attributes:
        losses: The calls of torch's losses.
        loss_results: The return values of these calls.
        reads: Operations on whose values the control-flow path may depend.
        iterated: Sequences that the forward iterates over without calling.
        left: The attributes of the copied modules before the forward.
    """

    def __init__(self, shallow_copy: ShallowCopy, dry: DryRun | None = None) -> None:
        super().__init__(shallow_copy, dry)
        self.parts = parts = shallow_copy.parts
        self.losses: list[LossCall] = []
        self.loss_results: list[object] = []
        self.reads: list[_ValueRead] = []
        self.iterated: set[str] = set()
        self.left = shallow_copy.attributes()
        self._ops: list[Op] = []
        self._starts: list[int] = []
        self._layouts: dict[ValueId, tuple[tuple[int, ...], torch.dtype]] = {}
        self._after_block = self._blocks_seen = False
        self._scope = rng_scope(0, 0, 0, 0)
        self._raw = {id(parameter): name for name, parameter in parts.model.named_parameters()}
        self._buffer_names = {id(buffer): name for name, buffer in parts.model.named_buffers()}
        self._buffer_memory = {storage_address(buffer) for buffer in parts.model.buffers()}
        self._parameters_of = {name: frozenset(map(id, unit.parameters())) for name, unit in parts.units.items()}
        self._buffers: set[str] = set()
        self._inputs: dict[int, int] = {}
        self._taken: set[int] = set()
        self._hooks = saved_tensor_hooks()
        self._inner: list[str] = []  # units that the running unit called, or whose parameters it used
        self._states: dict[ValueId, _AutogradState] = {}
        # Tensors that every layer creates and one layer wrote into: by address, the layer and the tensor. The entry
        # keeps the tensor alive, so that its address is not used again.
        self._filled: dict[int, tuple[int, Tensor]] = {}
        self._random: set[ValueId] = set()

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Trace]:
        """Runs the forward on copies of the arguments. Returns the output and the trace."""
        leaves, inputs = take_apart((tuple(args), dict(kwargs)))
        leaves = [copy_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # a tensor may occur twice
        carried = [ValueId(-1, index) for index, leaf in enumerate(leaves) if is_carried(leaf)]
        for value_id in carried:
            self._register(leaves[value_id.leaf], value_id)
        shared = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_carried(leaf)]
        versions = list(map(version, shared))
        self._inputs = {id(leaf): index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        for leaf in shared:
            self._layouts[ValueId(-1, self._inputs[id(leaf)])] = tuple(leaf.shape), leaf.dtype
        output = self.run(*inputs.filled(leaves))
        for leaf, before in zip(shared, versions, strict=True):
            if version(leaf) != before:
                raise CannotSplitError(CHANGES_INPUT.format(shape=tuple(leaf.shape), dtype=leaf.dtype))
        called = {name for op in self._ops if op.is_unit for name in (op.name, *op.inner)}
        raw = {name for op in self._ops for name in op.raw}
        for name, unit in self.parts.units.items():
            is_sequence = name not in called and type(unit).forward is nn.Sequential.forward
            if is_sequence and any(self._raw[parameter] in raw for parameter in self._parameters_of[name]):
                self.iterated.add(name)
        if not self._blocks_seen and not self.iterated:
            blocks, model = ", ".join(sorted(self.parts.blocks)[:3]), type(self.parts.model).__name__
            raise CannotSplitError(
                f"blocks: the forward of {model} calls none of {blocks}; it uses their methods or parts instead. "
                f"Name modules that it calls: gpipe.layers_of(model, sample, blocks=[...]). [blocks-not-called]",
                map(self.parts.caller, self.parts.blocks),
            )
        flat, structure = take_apart(output)
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        self._check_tensors(tensors, "the output", len(self._starts) - 1)
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

    def run_free(self, call: OpCall) -> Any:
        self._check_tensors(call.tensors, call.name, None)
        result = call.execute()
        leaves, _ = take_apart(result)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise CannotSplitError(UNSEEN.format(name=call.name))
        self._note_read(call, leaves)
        return result

    def run_op(self, call: OpCall) -> Any:
        if is_vmapped():
            raise CannotSplitError(UNSEEN.format(name=call.name))
        if saved_tensor_hooks() != self._hooks:
            raise CannotSplitError(SAVED_TENSOR_HOOKS.format(name=call.name))
        layer = self._layer_of_next(call)
        self._check_tensors(call.tensors, call.name, layer, is_unit=call.unit is not None)
        uses = self._ids_of(call.tensors)
        raw = tuple(dict.fromkeys(self._raw[id(tensor)] for tensor in call.tensors if id(tensor) in self._raw))
        leaves, returns, repeated = self._register_result(call, self._execute_in_layer(call, layer))
        if call.unit is None:
            self._reject_random_value(call, uses, leaves)
            self._note_read(call, leaves)
        inner, self._inner = tuple(dict.fromkeys(self._inner)), []
        self._ops.append(Op(call.name, call.unit is not None, uses, raw, returns, repeated, inner))
        self.op_index += 1
        return returns.filled(leaves)

    def _call_unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._in_unit:
            self._inner.append(name)
        return super()._call_unit(name, args, kwargs)

    def _layer_of_next(self, call: OpCall) -> int:
        """Returns the layer of the operation that begins. A layer starts at the first operation and after each block.

        The first layer also ends when the first block starts.
        """
        is_block = call.name in self.parts.blocks and call.unit is not None
        if not self._starts or self._after_block or (is_block and not self._blocks_seen):
            self._scope = rng_scope(SAMPLE_KEY.seed, SAMPLE_KEY.step, len(self._starts), SAMPLE_KEY.micro_batch)
            self._starts.append(self.op_index)
        self._after_block = is_block
        self._blocks_seen = self._blocks_seen or is_block
        return len(self._starts) - 1

    def _ids_of(self, tensors: Sequence[Tensor]) -> frozenset[ValueId]:
        return frozenset(value_id for tensor in tensors if (value_id := self.value_id_of(tensor)) is not None)

    def _check_tensors(
        self, tensors: Sequence[Tensor], name: str, layer: int | None, *, is_unit: bool = False
    ) -> None:
        """Records the buffers and inputs among tensors, and rejects tensors that no traced operation computed.

        Args:
            tensors: The arguments of an operation or free function.
            name: The name of the operation or function, for the error.
            layer: The layer of the operation. None for a free function, which every layer runs.
            is_unit: Whether the operation is a call of a unit.
        """
        for tensor in tensors:
            if id(tensor) in self._buffer_names:
                self._buffers.add(self._buffer_names[id(tensor)])
            if id(tensor) in self._inputs and not is_unit:  # a unit may pass on an input without reading it
                self._taken.add(self._inputs[id(tensor)])
            value_id = self.value_id_of(tensor)
            is_known = value_id is not None or not self._filled or is_vmapped()
            address = 0 if is_known else storage_address(tensor)
            if (address and self._filled.get(address, (layer,))[0] != layer) or self._is_unseen(tensor, value_id):
                raise CannotSplitError(UNSEEN.format(name=name))

    def _is_unseen(self, tensor: Tensor, value_id: ValueId | None) -> bool:
        """Whether the autograd graph of a tensor contains nodes that no operation created."""
        if value_id is None:
            return tensor.requires_grad and id(tensor) not in self._raw
        state = self._states[value_id]
        if tensor.requires_grad and not state.requires_grad:
            return True
        return tensor.grad_fn is not state.grad_fn and version(tensor) == state.version

    def _execute_in_layer(self, call: OpCall, layer: int) -> Any:
        """Executes an operation. Records the losses that it calls and the tensors that it changes in place."""
        loss = read_loss_call(call.name, call.args, call.kwargs) if call.unit is None else None
        may_have_loss = call.unit is not None and not self._after_block
        versions = list(map(version, call.tensors))
        grad_fns = {tensor.grad_fn for tensor in call.tensors if tensor.grad_fn is not None}
        reader = LossReader(self.losses)
        with self._scope, reader if may_have_loss else nullcontext():
            result = self.execute(call)
        if loss is not None:
            self.losses.append(loss)
        self.loss_results += reader.results if loss is None else [result]
        if call.unit is not None:
            self._inner += self._units_reached(call, result, grad_fns)
        for tensor, before in zip(call.tensors, versions, strict=True):
            if (value_id := self.value_id_of(tensor)) is not None:
                self._note_state(tensor, value_id)
            elif (  # `ShallowCopy.reject_changed_buffers` finds changed buffers later
                version(tensor) != before
                and id(tensor) not in self._inputs
                and (address := storage_address(tensor)) not in self._buffer_memory
            ):
                self._filled[address] = layer, tensor
        return result

    def _units_reached(self, call: OpCall, result: Any, until: Collection[Node]) -> list[str]:
        """Returns the other units whose parameters a unit has used, from the graph of the result up to `until`."""
        roots = [leaf for leaf in take_apart(result)[0] if isinstance(leaf, Tensor)]
        expected = {*self._parameters_of[call.name], *map(id, call.tensors)}
        reached: dict[str, None] = {}
        for leaf in leaves_of(roots, until):
            if id(leaf) in self._raw and id(leaf) not in expected:
                owner = next((name for name, ids in self._parameters_of.items() if id(leaf) in ids), None)
                if owner is None:
                    raise CannotSplitError(BY_REFERENCE.format(unit=call.name, parameter=self._raw[id(leaf)]))
                reached[owner] = None
        return list(reached)

    def _register_result(self, call: OpCall, result: Any) -> tuple[Leaves, Structure, Repeated]:
        """Registers each tensor of a result with a value id. Returns leaves, structure, and repeated leaves."""
        leaves, returns = take_apart(result)
        existing = set(map(id, call.tensors)), self._buffer_names, self._raw
        returned = len(take_apart(result.returned)[0]) if isinstance(result, Collected) else len(leaves)
        first: dict[int, ValueId] = {}
        repeated = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if index >= returned and (value_id := self.value_id_of(leaf)) is not None:  # a hook collected an argument
                first.setdefault(id(leaf), value_id)
            if first.setdefault(id(leaf), ValueId(self.op_index, index)) != (self.op_index, index):
                repeated[index] = first[id(leaf)]
                continue
            if any(id(leaf) in ids for ids in existing) or self.value_id_of(leaf) is not None:
                # A function that returns its argument here may return a new tensor for other inputs.
                leaves[index] = leaf.expand_as(leaf)
            self._register(leaves[index], ValueId(self.op_index, index))
        for index, (maker, leaf) in repeated.items():
            leaves[index] = leaves[leaf] if maker == self.op_index else leaves[index]
        return leaves, returns, repeated

    def _register(self, tensor: Tensor, value_id: ValueId) -> None:
        self.name_as(tensor, value_id)
        self._note_state(tensor, value_id)
        self._layouts[value_id] = tuple(tensor.shape), tensor.dtype

    def _note_state(self, tensor: Tensor, value_id: ValueId) -> None:
        self._states[value_id] = _AutogradState(tensor.grad_fn, version(tensor), tensor.requires_grad)

    def _note_read(self, call: OpCall, leaves: Sequence[Any]) -> None:
        """Records an operation whose values become Python values or shapes, because the path may depend on them."""
        key = call.args[1:2] if call.name == "__getitem__" else ()
        by_mask = any(getattr(leaf, "dtype", None) is torch.bool for leaf in take_apart(key)[0])
        shapes = call.name in SHAPED_BY_VALUES or (call.name == "where" and len(call.args) == 1) or by_mask
        values = [leaf for leaf in leaves if isinstance(leaf, (bool, int, float, np.ndarray))]
        if shapes or values:
            is_number = shapes or not all(isinstance(value, bool) for value in values)
            module = self.parts.running(frame for frame, _ in walk_stack(None))
            self.reads.append(_ValueRead(module, self.op_index, is_number))

    def doubtful(self) -> set[str]:
        """Returns the modules that read values of tensors and may decide from the values which blocks to call."""
        return {read.module for read in self.reads if read.module and not self._is_steady(read.module)}

    def _is_steady(self, module: str) -> bool:
        """Whether a module calls all blocks inside it one after another, and reads no value in between.

        If the module has a single block, it must call this block several times, and must not read a number, which may
        be the number of calls.
        """
        reads = [read for read in self.reads if read.module == module]
        blocks = {name for name in self.parts.blocks if name.startswith(f"{module}.")}
        calls = [index for index, op in enumerate(self._ops) if op.is_unit and op.name in blocks]
        is_single = len(blocks) == 1 and (len(calls) == 1 or any(read.is_number for read in reads))
        if is_single or {self._ops[index].name for index in calls} != blocks:
            return False
        first, last = calls[0], calls[-1]
        ancestors = {last}
        for index in range(last, first, -1):  # operations only use results of earlier ones
            if index in ancestors:
                ancestors |= {value_id.op for value_id in self._ops[index].uses}
        return first in ancestors and not any(first < read.op_index <= last for read in reads)

    def _reject_random_value(self, call: OpCall, uses: frozenset[ValueId], leaves: Leaves) -> None:
        """Raises an error for a Python value that depends only on random numbers."""
        is_random = uses <= self._random if uses else call.name in RANDOM
        threshold = next((item for item in call.args if isinstance(item, (int, float))), 0.5)
        if not is_random or (call.name in COMPARISONS and not 0 < threshold < 1):  # the result is always the same
            return
        if uses and any(isinstance(leaf, (bool, int, float)) for leaf in leaves):
            raise CannotSplitError(RANDOM_VALUE.format(model=type(self.parts.model).__name__))
        self._random |= {ValueId(self.op_index, index) for index in range(len(leaves))}

    def left_behind(self) -> list[str]:
        """Returns the attributes of the copied modules in which the forward has stored tensors."""
        return [
            f"{type(self.shallow_copy.copies[name]).__name__}.{key}"
            for name, key, value in self.shallow_copy.changed_since(self.left)
            if (name in self.parts.opened and hides_tensors(value)) or self._ids_of(list(tensors_in(value)))
        ]


class TracerRun(NamedTuple):
    """The results of one traced forward.

    Attributes:
        output: The model's output.
        trace: The trace.
        parts: The parts, with the modules that turned out to be stateful or iterated.
        losses: The calls of torch's losses.
        doubtful: Modules that may use values of tensors to decide which blocks to call.
    """

    output: Any
    trace: Trace
    parts: Parts
    losses: list[LossCall]
    doubtful: set[str]


def trace_forward(parts: Parts, arguments: ForwardArguments) -> TracerRun:
    """Traces a forward. Repeats until it finds no further modules that change buffers or are iterated over."""
    stateful = {name for name, module in parts.copied.items() if own_hooks(module)} - parts.opened
    iterated: set[str] = set()
    dry = DryRun() if lacks_values(parts.model) else None
    with nullcontext() if dry is None else dry.fake_tensors(parts.model):
        while True:
            parts = Parts(parts.model, parts.blocks, parts.stateful | stateful, parts.iterated | iterated)
            with watched(parts.model) as changed:
                tracer, output, trace = _traced(parts, arguments, dry)
            closed = {name: module for name, module in parts.copied.items() if name not in parts.opened}
            copies = tracer.shallow_copy.copies
            stateful = {
                name
                for name, module in closed.items()
                if any(f"{name}.{leaf}" in changed for leaf in module._buffers)
                or copies[name]._buffers.keys() - module._buffers.keys()  # registered in this forward
            }
            iterated = tracer.iterated
            if not stateful and not iterated:
                break
        if dry is None:
            _reject_leftovers(tracer, arguments, changed)
    loss, results = loss_in(output), tracer.loss_results
    losses = [call._replace(is_loss=result is loss) for call, result in zip(tracer.losses, results, strict=True)]
    return TracerRun(output, trace, parts, losses, tracer.doubtful())


def _traced(parts: Parts, arguments: ForwardArguments, dry: DryRun | None) -> tuple[Tracer, Any, Trace]:
    """Traces a forward. Rejects it if it stores tensors on modules or inputs, or uses other random generators."""
    tracers: list[Tracer] = []

    def run() -> tuple[Any, Trace]:
        tracers.append(Tracer(ShallowCopy(parts), dry))
        return tracers[-1].trace(*arguments)

    before = _generators()
    try:
        if dry is None:
            output, trace = run_split(parts.model, arguments, run, lambda: tracers[-1].left_behind())
        else:
            output, trace = run()
    except TypeError as error:
        if arguments.args and isinstance(arguments.args[0], (tuple, list)):
            names = ", ".join(signature(parts.model.forward).parameters)
            error.add_note(
                f"The {type(arguments.args[0]).__name__} was passed to the forward as one argument. To pass several "
                f"arguments, use a dict with keys among: {names}. [sample-is-one-argument]"
            )
        raise
    model = type(parts.model).__name__
    for name, value in (*enumerate(arguments.args), *arguments.kwargs.items()):
        for leaf in take_apart(value)[0]:
            if not isinstance(leaf, Tensor) and tokens_before(leaf) is None and hides_tensors(leaf):
                raise CannotSplitError(
                    f"{name}: {model} stores tensors in this {type(leaf).__name__}, but layers run separately, so "
                    f"each layer and recomputation would store other tensors. Remove this object from the inputs. To "
                    f"generate with a cache, call pipe.generate. [cache-in-inputs]"
                )
    if left := tracers[-1].left_behind():
        raise CannotSplitError(
            f"The forward of {model} leaves tensors in {', '.join(left)}. These tensors are lost, because every "
            f"layer runs copies of the modules that contain blocks. Return them as part of the output. "
            f"[tensor-left-on-module]"
        )
    for owner, state in _generators().items():
        if state != before[owner]:
            raise CannotSplitError(OTHER_GENERATOR.format(model=model, generator=owner))
    return tracers[-1], output, trace


def _reject_leftovers(tracer: Tracer, arguments: ForwardArguments, written: Collection[str]) -> None:
    """Raises an error if every forward changes state, or if modules that every layer runs have `written` buffers."""
    shallow_copy = tracer.shallow_copy
    shallow_copy.reject_changed_buffers(written)
    if [*shallow_copy.changed_since(tracer.left)]:
        after_first = shallow_copy.attributes()
        with watched(tracer.parts.model):
            arguments.call(shallow_copy.root)
        if changed := [*shallow_copy.changed_since(after_first)]:
            places = [f"{type(shallow_copy.copies[name]).__name__}.{key}" for name, key, _ in changed]
            text = CHANGES_STATE.format(model=type(tracer.parts.model).__name__, places=", ".join(places))
            raise CannotSplitError(text, [name for name, _, _ in changed])


def _generators() -> dict[str, object]:
    return {
        "Python's": random.getstate(),
        "numpy's": str(np.random.get_state()),
        "torch's": torch.default_generator.get_state().tolist(),
    }
