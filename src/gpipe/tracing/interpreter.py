"""Interprets a model's forward: its code runs from the top, and of its operations only those of some layers are done.

Operations are calls of units, and functions of torch between them. What those before returned is taken from what
crossed the cut; behind its own last operation the interpreter stops.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipe._torch.modes import paused
from gpipe.stages.buffers import Slot
from gpipe.stages.rng import PipeRngScope
from gpipe.stages.stage import Layer, LayerProgress, RngKey
from gpipe.tracing.meta_model import Dry
from gpipe.tracing.parts import ModelPart
from gpipe.tracing.shallow_copy import ShallowCopy
from gpipe.tracing.trace import OpCall, Trace
from gpipe.tracing.values import (
    CannotSplitError,
    OpaquePlaceholder,
    Placeholder,
    ValueId,
    asks_for_layout,
    describe,
    stand_in,
    take_apart,
)

RANDOM = frozenset(
    {
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
        "multinomial", "normal", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
        "feature_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax", "bernoulli_", "cauchy_",
        "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    }
)  # fmt: skip
"""Functions of torch that draw random numbers: they are operations, whatever they are given."""


class Interpreter(TorchFunctionMode):
    """Runs a forward on a shallow copy, operation by operation; `dry` does those of a model without values."""

    def __init__(self, shallow_copy: ShallowCopy, dry: Dry | None = None) -> None:
        super().__init__()
        self.shallow_copy = shallow_copy
        self.dry = dry
        self.at = 0  # the number of the next operation
        self._in_unit = False
        self._value_ids: dict[int, tuple[weakref.ref[Tensor], ValueId]] = {}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the model."""
        self.shallow_copy.on_call = self._unit
        try:
            with self:
                return self.shallow_copy.root(*args, **kwargs)
        finally:
            self.shallow_copy.on_call = None

    def value_id_of(self, tensor: Tensor) -> ValueId | None:
        """What a tensor is called that an operation made; None of any other."""
        found = self._value_ids.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def name_as(self, tensor: Tensor, value_id: ValueId) -> None:
        """Has a tensor be known by a value id."""
        self._value_ids[id(tensor)] = weakref.ref(tensor), value_id

    def depends(self, tensor: Tensor) -> bool:
        """Whether an operation on a tensor is an operation."""
        return self.value_id_of(tensor) is not None or isinstance(tensor, nn.Parameter) or tensor.requires_grad

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Sees a function of torch that the forward calls between units."""
        given = kwargs or {}
        if self._in_unit or asks_for_layout(func):
            return func(*args, **given)
        call = OpCall.of(getattr(func, "__name__", str(func)), func, args, given)
        if call.name not in RANDOM and not any(map(self.depends, call.tensors)):
            return self.free(call)
        if call.name == "__iter__":
            return iter(self.op(call._replace(name="unbind", func=_parts_of)))
        return self.op(call)

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.shallow_copy.units[name]
        if self._in_unit:
            return unit(*args, **kwargs)
        self._in_unit = True
        try:
            with paused(self):
                return self.op(OpCall.of(name, unit, args, kwargs))
        finally:
            self._in_unit = False

    def do(self, call: OpCall) -> Any:
        """Does what an operation is."""
        return call.do() if self.dry is None else self.dry.do(call)

    def free(self, call: OpCall) -> Any:
        """Does an operation that depends on whole numbers of the inputs alone."""
        return call.do()

    @abstractmethod
    def op(self, call: OpCall) -> Any:
        """Does the next operation, or says what comes of it."""


def _parts_of(tensor: Tensor) -> list[Tensor]:
    return list(torch.unbind(tensor))


OTHER_OPS = (
    "the forward takes another path than on the sample: {now} where {then} came. A branch on a value, a dropped "
    "layer or a changed setting leads elsewhere. Name the modules inside of which it branches (of a mixture of "
    "experts, the one that chooses among them): blocks=[...], with names as in model.named_modules(); or give a "
    "sample that takes the path of training, and one path alone"
)
OTHER_VALUE = "{name} returns another structure than on the sample; let it return the same with every input"
OTHER_OUTPUT = (
    "the model's output has other parts than it has by itself on the sample. What is collected on the way from "
    "inside of blocks (output_hidden_states, output_attentions, output_router_logits) is not seen in layers: leave "
    "it out of what the model is given, and of model.config"
)
NOT_THERE = (
    "{name} needs a value that an earlier layer made, and that did not cross the cuts: on the sample it was not "
    "needed here, or it is of a kind that cannot cross ({kind}). Let blocks hand on tensors, in tuples, lists, "
    "dicts or dataclasses, or name other blocks: blocks=[...]"
)
Values: TypeAlias = Mapping[ValueId, Tensor | None]


class Enough(BaseException):
    """Ends an interpretation behind its last operation."""


class StageInterpreter(Interpreter):
    """Does the operations of some layers.

    Args:
        shallow copy: What is interpreted.
        trace: The way to go.
        layers: Those whose operations are done, consecutive.
        values: What crossed the cut.
        log: What the operations before returned, inputs first; it grows.
        wanted: What is asked of these layers.
        device: Where tensors are.
        rng_key: When this is.
        progress: Is told how far the interpreter got.
        dry: Does the operations of a model without values.

    Attributes:
        made: What was wanted, as far as there is a tensor.
    """

    def __init__(
        self,
        shallow_copy: ShallowCopy,
        trace: Trace,
        layers: Sequence[Layer],
        values: Values,
        log: list[list[Any]],
        wanted: frozenset[ValueId],
        device: torch.device,
        rng_key: RngKey,
        progress: LayerProgress,
        dry: Dry | None = None,
    ) -> None:
        super().__init__(shallow_copy, dry)
        self.trace, self.layers, self.log, self.device = trace, layers, log, device
        self.begin, self.end = trace.ops_of(layers[0].index, layers[-1].index)
        self.is_last = layers[-1].index == len(trace.starts) - 1
        self.made = {
            value_id: value for value_id, value in values.items() if value_id in wanted and value is not None
        }
        self._values, self._wanted, self._key, self._progress = values, wanted, rng_key, progress
        self._raw = {
            id(module._parameters[leaf]): name
            for layer in layers
            if isinstance(layer.module, ModelPart)
            for name, (_, places) in layer.module.raw.items()
            for module, leaf in places
        }
        self._entered = -1
        self._rng_scope: PipeRngScope | None = None
        self._slots: Mapping[str, tuple[Slot, Sequence[Slot]]] = {}

    def go(self, inputs: Sequence[Any]) -> Any:
        """Walks; gives the output of the model, if the last layer is among those done."""
        leaves = [
            self._leaf(ValueId(-1, at), described, leaf)
            for at, (described, leaf) in enumerate(zip(self.log[0], inputs, strict=True))
        ]
        args, kwargs = self.trace.inputs.filled(leaves)
        try:
            output = self.run(args, kwargs)
        except Enough:
            output = None
        else:
            self._check(output)
        self._enter(self.layers[-1].index)
        self.shallow_copy.refuse_changed_buffers()
        return output

    def _leaf(self, value_id: ValueId, described: Sequence[Any], found: Any = None) -> Any:
        """What comes of a leaf of an operation before, or of an input."""
        if found is None:
            found = self._values.get(value_id)
            if found is None:
                found = stand_in(described, value_id, self.device)
            if isinstance(found, Tensor):
                self.name_as(found, value_id)
        return found

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.at < self.begin and not self._in_unit:
            return self._pass(name)
        return super()._unit(name, args, kwargs)

    def op(self, call: OpCall) -> Any:
        """Does an operation, or gives what it brought before."""
        name = call.name
        if self.at < self.begin:
            return self._pass(name)
        at = self._next(name)
        self._enter(self.trace.layer_of(at))
        _refuse_placeholders(call)
        layer = self.layers[self._entered - self.layers[0].index]
        assert self._rng_scope is not None
        with layer.aliased, self._rng_scope:
            if any(id(tensor) in self._raw for tensor in call.tensors):
                call = call.given(self._own_parameter)
            made = self.do(call)
        leaves, structure = take_apart(made)
        op = self.trace.ops[at]
        parted = any(leaves[place] is not leaves[first] for place, first in op.again)
        if parted or (structure is not op.returns and structure != op.returns):
            raise CannotSplitError(OTHER_VALUE.format(name=name))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                value_id = ValueId(at, place)
                self.name_as(leaf, value_id)
                if value_id in self._wanted:
                    self.made[value_id] = leaf
        self.log.append(describe(leaves))
        if self.at == self.end and not self.is_last:
            raise Enough
        return made

    def _pass(self, name: str) -> Any:
        at = self._next(name)
        op = self.trace.ops[at]
        leaves = [self._leaf(ValueId(at, place), found) for place, found in enumerate(self.log[at + 1])]
        for place, first in op.again:
            leaves[place] = leaves[first]
        return op.returns.filled(leaves)

    def _next(self, name: str) -> int:
        """The number of the operation that begins, which must be the traced one."""
        at, self.at = self.at, self.at + 1
        then = self.trace.ops[at].name if at < len(self.trace.ops) else "the end"
        if then != name:
            raise CannotSplitError(OTHER_OPS.format(now=name, then=then))
        return at

    def _enter(self, index: int) -> None:
        """Enters the layers up to this one."""
        for layer in self.layers:
            if self._entered < layer.index <= index:
                self._progress.enter()
                self._entered = layer.index
                key = self._key
                self._rng_scope = PipeRngScope(key.seed, key.step, layer.index, key.micro_batch)
                self._slots = layer.module.raw if isinstance(layer.module, ModelPart) else {}

    def _own_parameter(self, tensor: Tensor) -> Tensor:
        """A parameter as the layer has it: in place of one that others use too, its alias."""
        name = self._raw.get(id(tensor))
        if name is None or name not in self._slots:
            return tensor
        (holder, leaf), _ = self._slots[name]
        found = holder._parameters[leaf]
        assert found is not None
        return found

    def _check(self, output: Any) -> None:
        """Checks that the interpreter came to the end of the trace, and that the output is whole."""
        if self.at != len(self.trace.ops):
            raise CannotSplitError(OTHER_OPS.format(now="the end", then=self.trace.ops[self.at].name))
        leaves, structure = take_apart(output)
        if structure != self.trace.output:
            raise CannotSplitError(OTHER_OUTPUT)
        if any(isinstance(leaf, (Placeholder, OpaquePlaceholder)) for leaf in leaves):
            _refuse("the output", "a tensor, or an object that holds some")


def _refuse_placeholders(call: OpCall) -> None:
    if any(type(tensor) is Placeholder for tensor in call.tensors):
        _refuse(call.name, "a tensor")
    if any(isinstance(value, OpaquePlaceholder) for value in (*call.args, *call.kwargs.values())):
        _refuse(call.name, "an object that holds more than tensors")


def _refuse(name: str, kind: str) -> Never:
    raise CannotSplitError(NOT_THERE.format(name=name, kind=kind))
