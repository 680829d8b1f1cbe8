"""Interprets the forward of a traced model: the Python code runs from the top, but only some layers compute.

The forward consists of operations. An operation is a call of a unit (a module that runs as a whole), or a torch
function between units. The results of earlier operations are the tensors that crossed the stage boundary, or
placeholders. The interpreter stops after the last operation of its layers.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any, NamedTuple, Never, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipe._torch.dispatcher import without_memory
from gpipe._torch.modes import as_plain_tensors, paused
from gpipe.stages.buffers import Slot
from gpipe.stages.rng import PipeRngScope
from gpipe.stages.stage import Layer, LayerProgress, RngKey
from gpipe.stages.tree import hides_tensors
from gpipe.tracing.meta_model import DryRun
from gpipe.tracing.parts import ModelPart
from gpipe.tracing.shallow_copy import ShallowCopy
from gpipe.tracing.trace import CannotSplitError, Collected, OpCall, Trace, ValueId, open_lists, take_apart

LAYOUT = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
    "is_signed", "__len__", "stride", "is_contiguous", "storage_offset", "get_device", "__hash__", "__repr__",
    "__str__", "__format__", "requires_grad_",
})  # fmt: skip
"""Methods of a tensor that do not read its values. Getters of attributes do not read values either."""
TENSORS_OF = frozenset({"T", "mT", "H", "mH", "real", "imag", "data", "grad"})
"""Attributes of a tensor that are tensors themselves."""
RANDOM = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
    "multinomial", "normal", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax", "bernoulli_", "cauchy_",
    "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
})  # fmt: skip
"""Functions of torch that use random numbers. Their calls are always operations, regardless of the arguments."""

OTHER_OP = (
    "The forward takes a different path than on the sample: it reaches {now} instead of {then}. Pass a sample that "
    "takes the path of training, or put the branch into a block: gpipe.layers_of(model, sample, blocks=[...]). "
    "[branch-on-value]"
)
OTHER_SIZE = (
    "The forward takes a different path for an input of shape {shape} than on the sample, with shape {known}: it "
    "reaches {now} instead of {then}. Use fewer micro_batches=, or a sample of this shape, such as batch[:1]. "
    "[branch-on-shape]"
)
OTHER_STRUCTURE = (
    "{name}: the returned value has a different structure than for the sample. Return the same structure for every "
    "input. [block-structure-differs]"
)
MISSING = (
    "{name} needs {value} of an earlier layer, which did not cross the stage boundary. Return tensors from blocks, "
    "in tuples, lists, dicts or dataclasses, or choose different blocks: gpipe.layers_of(model, sample, "
    "blocks=[...]). [value-missing-at-boundary]"
)
HIDDEN_TENSORS = (
    "{name}: argument {argument} is a {kind} that holds tensors of an earlier layer, which cannot cross stage "
    "boundaries. Pass the tensors to blocks as arguments. In peft, use LoRA or prompt tuning instead of prefix "
    "tuning. [tensors-in-object]"
)


def asks_for_layout(function: Callable[..., Any]) -> bool:
    """Whether a method of a tensor, or the getter of an attribute, does not read the tensor's values.

    >>> asks_for_layout(Tensor.size), asks_for_layout(Tensor.shape.__get__), asks_for_layout(Tensor.mT.__get__)
    (True, True, False)
    """
    name = getattr(function, "__name__", "")
    if name != "__get__":
        return name in LAYOUT
    return getattr(getattr(function, "__self__", None), "__name__", "") not in TENSORS_OF


class Placeholder(Tensor):
    """A tensor without values or memory. Its layout can be read, but computing with it raises an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not asks_for_layout(func):
            raise _missing(getattr(func, "__name__", str(func)), "a tensor")
        if func is Tensor.requires_grad_:
            vars(args[0])["is_changed"] = True  # so that no later run uses it
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Never:  # type: ignore[override]
        raise _missing(str(func), "a tensor")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # without values: there are none
        return f"Placeholder({tuple(self.shape)}, {self.dtype})"


class OpaquePlaceholder:
    """Stands for a value that cannot cross stage boundaries. Reading its attributes raises an error."""

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _missing(f"between blocks .{name}", "an array or an object")


def _missing(name: str, value: str) -> CannotSplitError:
    return CannotSplitError(MISSING.format(name=name, value=value))


SAMPLE_KEY = RngKey(0, 0, 0)  # keys the random numbers of runs on the sample
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
SENT_BY_VALUE = (bool, int, float, str, type(None))
Descriptions: TypeAlias = list[list[Any]]  # one for each leaf: see `describe`


def describe(leaves: Sequence[Any]) -> Descriptions:
    """Returns a JSON description of each leaf: the layout of a tensor, a plain value, or `[]` for other objects."""
    return [
        [str(leaf.dtype), list(leaf.shape), leaf.requires_grad]
        if isinstance(leaf, Tensor)
        else ([leaf] if isinstance(leaf, SENT_BY_VALUE) else [])
        for leaf in leaves
    ]


ValueIds: TypeAlias = dict[int, tuple[weakref.ref[Tensor], ValueId]]


class SkippedOps(NamedTuple):
    """Results of operations of earlier stages that all runs of a stage on one log share.

    Attributes:
        results: The results that consist of placeholders and plain values only, by the index of the operation.
        value_ids: The placeholders in these results, with their value ids.
    """

    results: dict[int, Any]
    value_ids: ValueIds

    def clear_if_changed(self) -> None:
        """Forgets all results if a run has stored an attribute on a placeholder, or changed its `requires_grad`."""
        for placeholder, _ in self.value_ids.values():
            if vars(placeholder()):
                self.results.clear()
                self.value_ids.clear()
                break


class Interpreter(TorchFunctionMode):
    """Runs a forward on a shallow copy of the model, operation by operation.

    Attributes:
        op_index: The index of the next operation.
        dry: Executes the operations of a model on the meta device. None if the model has values.
    """

    def __init__(self, shallow_copy: ShallowCopy, dry: DryRun | None = None) -> None:
        super().__init__()
        self.shallow_copy = shallow_copy
        self.dry = dry
        self.op_index = 0
        self._in_unit = False
        self._value_ids: ValueIds = {}
        self._outer_context = copy_context()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.shallow_copy.on_call = self._call_unit
        self._outer_context = copy_context()
        try:
            with self:
                return self.shallow_copy.root(*args, **kwargs)
        finally:
            self.shallow_copy.on_call = None

    def value_id_of(self, tensor: Tensor) -> ValueId | None:
        entry = self._value_ids.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def name_as(self, tensor: Tensor, value_id: ValueId) -> None:
        self._value_ids[id(tensor)] = weakref.ref(tensor), value_id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_unit or asks_for_layout(func):
            return func(*args, **kwargs)
        call = OpCall.of(getattr(func, "__name__", str(func)), func, args, kwargs)
        if call.name not in RANDOM and not any(map(self._depends, call.tensors)):
            return self.run_free(call)
        if call.name == "__iter__":
            return iter(self.run_op(call._replace(name="unbind", func=torch.unbind)))
        return self.run_op(call)

    def _depends(self, tensor: Tensor) -> bool:
        return self.value_id_of(tensor) is not None or tensor.requires_grad or isinstance(tensor, nn.Parameter)

    def _call_unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.shallow_copy.parts.units[name]
        if self._in_unit:
            return unit(*args, **kwargs)
        lists = open_lists(self._outer_context)
        call = OpCall.of(name, unit, args, kwargs, lists)
        self._in_unit = True
        try:
            with paused(self):
                return self._add_collected(name, lists, self.run_op(call))
        finally:
            self._in_unit = False

    @staticmethod
    def _add_collected(name: str, lists: Sequence[list[Any]], result: Any) -> Any:
        """Adds the items that a unit collected to the open lists, and returns its result (note "Collections")."""
        additions = result.additions if isinstance(result, Collected) else []
        if len(additions) != len(lists):
            raise CannotSplitError(OTHER_STRUCTURE.format(name=name))
        for items, added in zip(lists, additions, strict=True):
            items += added
        return result.returned if lists else result

    def execute(self, call: OpCall) -> Any:
        return call.execute() if self.dry is None else self.dry.execute(call)

    def run_free(self, call: OpCall) -> Any:
        """Runs a function that is not an operation, because it depends only on integer and boolean inputs."""
        return call.execute()

    @abstractmethod
    def run_op(self, call: OpCall) -> Any:
        """Runs the next operation, or returns its known result."""


class StopInterpretation(BaseException):
    """Raised to end the forward after the last operation of the layers."""


class StageInterpreter(Interpreter):
    """Runs the operations of consecutive layers.

    Args:
        shallow_copy: The copy of the model to run.
        trace: The trace of the path that the forward takes.
        layers: The layers to run.
        values: The tensors that crossed the stage boundary.
        log: The descriptions of the inputs, followed by descriptions of the results of all earlier operations. The
            run appends descriptions, except in the last layer.
        wanted: The tensors that later layers need. After the run, `produced` holds the tensors that this run has
            computed or received.
        device: The device for placeholders.
        rng_key: The key of the random numbers. Default: the key of the sample.
        progress: Receives the current layer, for error messages.
        dry: Executes the operations of a model on the meta device.
        skipped: The results of skipped operations from earlier runs with the same trace, log and crossing tensors.
    """

    def __init__(
        self,
        shallow_copy: ShallowCopy,
        trace: Trace,
        layers: Sequence[Layer],
        values: Mapping[ValueId, Tensor | None],
        log: list[Descriptions],
        wanted: frozenset[ValueId],
        device: torch.device,
        rng_key: RngKey = SAMPLE_KEY,
        progress: LayerProgress | None = None,
        dry: DryRun | None = None,
        skipped: SkippedOps | None = None,
    ) -> None:
        super().__init__(shallow_copy, dry)
        self._skipped = SkippedOps({}, {}) if skipped is None else skipped
        self._skipped.clear_if_changed()
        self._value_ids = {**self._skipped.value_ids}
        self.trace, self.log, self.device = trace, log, device
        self.last_layer = layers[-1].index
        self.is_last = self.last_layer == len(trace.starts) - 1
        self.begin, self.end = trace.starts[layers[0].index], (*trace.starts, len(trace.ops))[self.last_layer + 1]
        self.produced = {
            value_id: value for value_id, value in values.items() if value_id in wanted and value is not None
        }
        self._values, self._wanted = values, wanted
        self._progress = progress or LayerProgress()
        self._layers_to_enter = list(layers)
        self._layer = layers[0]
        self._rng_scope = PipeRngScope(rng_key.seed, rng_key.step, self._layer.index, rng_key.micro_batch)
        self._layer_slots: Mapping[int, Slot] = {}  # where the layer holds the model's parameters, by their identity

    def interpret(self, inputs: Sequence[Any]) -> Any:
        """Runs the forward. Returns the model's output if it runs the last layer, otherwise None."""
        leaves = [
            self._receive(ValueId(-1, index), description) if leaf is None else leaf
            for index, (description, leaf) in enumerate(zip(self.log[0], inputs, strict=True))
        ]
        args, kwargs = self.trace.inputs.filled(leaves)
        output = None
        with suppress(StopInterpretation):
            output = self.run(args, kwargs)
            self._check_end(output)
        self._enter(self.end)
        self.shallow_copy.reject_changed_buffers()
        return output

    def _receive(self, value_id: ValueId, description: Sequence[Any]) -> Any:
        """Returns the value of an input or earlier operation that crossed the stage boundary, or a placeholder."""
        value: Any = self._values.get(value_id)
        if value is None:
            match description:
                case [dtype, shape, requires_grad]:
                    value = without_memory(Placeholder, shape, DTYPES[dtype], self.device, requires_grad)
                case [plain]:
                    return plain
                case _:
                    return OpaquePlaceholder()
        self.name_as(value, value_id)
        return value

    def _call_unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.op_index < self.begin:
            result = self._skip_op(self._advance(name))
            if type(result) is Collected:
                return self._add_collected(name, open_lists(self._outer_context), result)
            return result
        return super()._call_unit(name, args, kwargs)

    def _advance(self, name: str) -> int:
        """Returns the index of the current operation. Checks that the trace has the same operation at this index."""
        index, self.op_index = self.op_index, self.op_index + 1
        then = self.trace.ops[index].name if index < len(self.trace.ops) else "the end"
        if then != name:
            raise self._other_path(name, then)
        return index

    def _other_path(self, now: str, then: str) -> CannotSplitError:
        """Returns the error for an operation that is not in the trace. It names an input whose size is or was 1."""
        for index, description in enumerate(self.log[0]):
            known, _ = self.trace.layouts.get(ValueId(-1, index), ((), None))
            match description:
                case [_, shape, _] if any((new == 1) != (old == 1) for new, old in zip(shape, known, strict=False)):
                    return CannotSplitError(OTHER_SIZE.format(now=now, then=then, shape=shape, known=[*known]))
        return CannotSplitError(OTHER_OP.format(now=now, then=then))

    def run_op(self, call: OpCall) -> Any:
        index = self._advance(call.name)
        if index < self.begin:
            return self._skip_op(index)
        self._enter(index)
        result = self._execute_in_layer(call)
        op = self.trace.ops[index]
        leaves, structure = take_apart(result)
        # With a different number of rows, `unbind` returns a different number of tensors.
        may_vary = type(result) is tuple is op.returns.spec.type and index in self.trace.inside
        differs = structure is not op.returns and structure != op.returns and not may_vary
        for place, leaf in enumerate(leaves):
            if place in op.repeated:
                differs = differs or self.value_id_of(leaf) != op.repeated[place]
            elif isinstance(leaf, Tensor):
                value_id = ValueId(index, place)
                self._value_ids[id(leaf)] = weakref.ref(leaf), value_id
                if value_id in self._wanted:
                    self.produced[value_id] = leaf
        if differs:
            raise CannotSplitError(OTHER_STRUCTURE.format(name=call.name))
        if not self.is_last:
            self.log.append(describe(leaves))
            if self.op_index == self.end:
                raise StopInterpretation
        return result

    def _skip_op(self, index: int) -> Any:
        """Returns the result of an operation of an earlier layer, from the log and the values that were received."""
        if (result := self._skipped.results.get(index)) is not None:
            return result
        op = self.trace.ops[index]
        leaves = [
            self._receive(ValueId(index, place), description) for place, description in enumerate(self.log[index + 1])
        ]
        for place, (maker, leaf) in op.repeated.items():
            known = ValueId(maker, leaf), self.log[maker + 1][leaf]
            leaves[place] = leaves[leaf] if maker == index else self._receive(*known)
        result = op.returns.filled(leaves) if len(leaves) == op.returns.spec.num_leaves else tuple(leaves)
        crosses = any(value_id.op == index for value_id in self._values)
        others = {*map(type, leaves)}.difference((Placeholder, *SENT_BY_VALUE))
        if op.returns.is_immutable and not (crosses or op.repeated or others):
            self._skipped.results[index] = result
            tensors = (id(leaf) for leaf in leaves if isinstance(leaf, Tensor))
            self._skipped.value_ids.update((key, self._value_ids[key]) for key in tensors)
        return result

    def _execute_in_layer(self, call: OpCall) -> Any:
        if Placeholder in map(type, call.tensors):
            raise _missing(call.name, "a tensor")
        if OpaquePlaceholder in map(type, (*call.args, *call.kwargs.values())):
            raise _missing(call.name, "an array or an object")
        with self._layer.aliased, self._rng_scope:
            if self._layer_slots and any(id(tensor) in self._layer_slots for tensor in call.tensors):
                call = call.map_tensors(self._parameter_of_layer)
            try:
                return self.execute(call)
            except CannotSplitError as error:
                arguments = [*enumerate(call.args), *call.kwargs.items()] if call.unit is not None else []
                for argument, value in arguments:
                    if hides_tensors(value, Placeholder):
                        text = HIDDEN_TENSORS.format(name=call.name, kind=type(value).__name__, argument=argument)
                        raise CannotSplitError(text, error.places) from error
                raise

    def _enter(self, op: int) -> None:
        """Enters all layers that start at or before an operation."""
        while self._layers_to_enter and self.trace.starts[self._layers_to_enter[0].index] <= op:
            layer = self._layer = self._layers_to_enter.pop(0)
            self._progress.enter()
            self._rng_scope.set_layer(layer.index)
            self._layer_slots = layer.module.slots_of_parameters() if isinstance(layer.module, ModelPart) else {}

    def _parameter_of_layer(self, tensor: Tensor) -> Tensor:
        """Returns the layer's alias of a parameter that several layers use. Returns other tensors unchanged."""
        if id(tensor) not in self._layer_slots:
            return tensor
        holder, leaf = self._layer_slots[id(tensor)]
        parameter = holder._parameters[leaf]
        assert parameter is not None
        return parameter

    def _check_end(self, output: Any) -> None:
        """Raises an error if the forward ends earlier than the trace, or if its output is incomplete."""
        if self.op_index != len(self.trace.ops):
            raise self._other_path("the end", self.trace.ops[self.op_index].name)
        leaves, structure = take_apart(output)
        if structure != self.trace.output:
            raise CannotSplitError(
                "The output of the split model has a different structure than the model's output for the sample. "
                "Turn off caches (use_cache=False), and return values that blocks store elsewhere. "
                "[output-structure-differs]"
            )
        if any(isinstance(leaf, (Placeholder, OpaquePlaceholder)) for leaf in leaves):
            raise _missing("the output", "a tensor or an object")
