"""Interprets a model's forward: its code runs from the top, and of its operations only those of some layers are done.

Operations are calls of units, and functions of torch between them. What those before returned is taken from what
crossed the cut; what did not cross, a placeholder stands for. Behind its own last operation the interpreter stops.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Never, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipe._torch.dispatcher import without_memory
from gpipe._torch.modes import as_plain_tensors, paused
from gpipe.stages.buffers import Slot
from gpipe.stages.rng import PipeRngScope
from gpipe.stages.stage import Layer, LayerProgress, RngKey
from gpipe.stages.tree import hides_tensors
from gpipe.tracing.meta_model import Dry
from gpipe.tracing.parts import ModelPart
from gpipe.tracing.shallow_copy import ShallowCopy
from gpipe.tracing.trace import CannotSplitError, Collected, OpCall, Trace, ValueId, open_lists, take_apart

LAYOUT = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
    "is_signed", "__len__", "stride", "is_contiguous", "storage_offset", "get_device", "__hash__", "__repr__",
    "__str__", "__format__", "requires_grad_",
})  # fmt: skip
"""What is asked of a tensor without a look at its values, beside its attributes."""
TENSORS_OF = frozenset({"T", "mT", "H", "mH", "real", "imag", "data", "grad"})
"""The attributes of a tensor that are tensors themselves."""
RANDOM = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
    "multinomial", "normal", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax", "bernoulli_", "cauchy_",
    "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
})  # fmt: skip
"""Functions of torch that draw random numbers: they are operations, whatever they are given."""

OTHER_OPS = (
    "the forward takes another path than on the sample: {now} where {then} came. A branch on a value or on "
    "whether gradients are recorded (x.requires_grad), a dropped layer or a changed setting leads elsewhere. Name "
    "the modules inside of which it branches (of a mixture of experts, the one that chooses among them): "
    "blocks=[...], with names as in model.named_modules(); or give a sample that takes the "
    "path of training, and one path alone"
)
OTHER_SIZE = (
    "the forward takes another path than on the sample: {now} where {then} came. An input has shape {shape}, and had "
    "{known} on the sample: the forward may treat a size of 1 differently. Avoid this size, for example by fewer "
    "micro_batches=, or make the pipe with a sample that has it, sample=batch[:1]"
)
OTHER_VALUE = "{name} returns another structure than on the sample; let it return the same with every input"
OTHER_OUTPUT = (
    "the model's output has other parts than it has by itself on the sample. Caches, and what blocks put elsewhere "
    "than into lists that the forward opens in a context variable, as transformers does, are not seen in layers: "
    "leave them out of what the model is given, and of model.config"
)
NOT_THERE = (
    "{name} needs a value that an earlier layer made, and that did not cross the cuts: on the sample it was not "
    "needed here, or it is of a kind that cannot cross ({kind}). Let blocks hand on tensors, in tuples, lists, "
    "dicts or dataclasses, or name other blocks: blocks=[...]"
)

HOLDS = (
    "{name} is given a {kind} (argument {argument}) that holds tensors of an earlier layer. Only tensors in tuples, "
    "lists, dicts and dataclasses cross the cuts. Pass these tensors to blocks as arguments. Prefix tuning of peft "
    "keeps its prefixes in such a cache: use PromptTuningConfig, PromptEncoderConfig or LoraConfig"
)


def asks_for_layout(function: Callable[..., Any]) -> bool:
    """Whether a function of tensors, or the getter of an attribute, looks at no values.

    >>> asks_for_layout(Tensor.size), asks_for_layout(Tensor.shape.__get__), asks_for_layout(Tensor.mT.__get__)
    (True, True, False)
    """
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    return name in LAYOUT or (name == "__get__" and getattr(owner, "__name__", "") not in TENSORS_OF)


class Placeholder(Tensor):
    """A tensor without values or memory: whoever asks for its layout gets it, whoever computes with it is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not asks_for_layout(func):
            _refuse(getattr(func, "__name__", str(func)), "a tensor")
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Never:  # type: ignore[override]
        _refuse(str(func), "a tensor")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # without what it holds: there is nothing
        return f"Placeholder({tuple(self.shape)}, {self.dtype})"


class OpaquePlaceholder:
    """Stands for a value of a kind that does not cross cuts: whoever looks into it is refused."""

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"between blocks .{name}", "an array of numpy, an object of a class")


def _refuse(name: str, kind: str) -> Never:
    raise CannotSplitError(NOT_THERE.format(name=name, kind=kind))


SAMPLE_KEY = RngKey(0, 0, 0)  # when a sample is, for its random numbers
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
CARRIED_AS_THEY_ARE = (bool, int, float, str, type(None))
Described: TypeAlias = list[list[Any]]  # of each leaf what `describe` says of it


def describe(leaves: Sequence[Any]) -> Described:
    """What is written down of what an operation returned: of a tensor its layout, of plain values themselves."""
    return [
        [str(leaf.dtype), list(leaf.shape), leaf.requires_grad]
        if isinstance(leaf, Tensor)
        else ([leaf] if isinstance(leaf, CARRIED_AS_THEY_ARE) else [])
        for leaf in leaves
    ]


class Interpreter(TorchFunctionMode):
    """Runs a forward on a shallow copy, operation by operation; `dry` does those of a model without values."""

    def __init__(self, shallow_copy: ShallowCopy, dry: Dry | None = None) -> None:
        super().__init__()
        self.shallow_copy = shallow_copy
        self.dry = dry
        self.at = 0  # the number of the next operation
        self._in_unit = False
        self._value_ids: dict[int, tuple[weakref.ref[Tensor], ValueId]] = {}
        self._outside = copy_context()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.shallow_copy.on_call = self._unit
        self._outside = copy_context()
        try:
            with self:
                return self.shallow_copy.root(*args, **kwargs)
        finally:
            self.shallow_copy.on_call = None

    def value_id_of(self, tensor: Tensor) -> ValueId | None:
        found = self._value_ids.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def name_as(self, tensor: Tensor, value_id: ValueId) -> None:
        self._value_ids[id(tensor)] = weakref.ref(tensor), value_id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if self._in_unit or asks_for_layout(func):
            return func(*args, **given)
        call = OpCall.of(getattr(func, "__name__", str(func)), func, args, given)
        if call.name not in RANDOM and not any(map(self._depends, call.tensors)):
            return self.free(call)
        if call.name == "__iter__":
            return iter(self.op(call._replace(name="unbind", func=torch.unbind)))
        return self.op(call)

    def _depends(self, tensor: Tensor) -> bool:
        return self.value_id_of(tensor) is not None or tensor.requires_grad or isinstance(tensor, nn.Parameter)

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.shallow_copy.parts.units[name]
        if self._in_unit:
            return unit(*args, **kwargs)
        lists = open_lists(self._outside)
        call = OpCall.of(name, unit, args, kwargs, lists)
        self._in_unit = True
        try:
            with paused(self):
                return self._collect(name, lists, self.op(call))
        finally:
            self._in_unit = False

    @staticmethod
    def _collect(name: str, lists: Sequence[list[Any]], made: Any) -> Any:
        """Adds to the lists that are open what a unit did; gives what it returned (note "Collections")."""
        more = made.more if isinstance(made, Collected) else []
        if len(more) != len(lists):
            raise CannotSplitError(OTHER_VALUE.format(name=name))
        for one, new in zip(lists, more, strict=True):
            one += new
        return made.returned if lists else made

    def do(self, call: OpCall) -> Any:
        return call.do() if self.dry is None else self.dry.do(call)

    def free(self, call: OpCall) -> Any:
        """Does what depends on whole numbers of the inputs alone, and is no operation."""
        return call.do()

    @abstractmethod
    def op(self, call: OpCall) -> Any:
        """Does the next operation, or says what comes of it."""


class Enough(BaseException):
    """Ends an interpretation behind its last operation."""


class StageInterpreter(Interpreter):
    """Does the operations of consecutive layers."""

    def __init__(
        self,
        shallow_copy: ShallowCopy,
        trace: Trace,
        layers: Sequence[Layer],
        values: Mapping[ValueId, Tensor | None],  # what crossed the cut
        # of what the operations before returned, inputs first; it grows, but with the last layer
        log: list[Described],
        wanted: frozenset[ValueId],  # of what the layers make; behind them it is `made`, as far as there is a tensor
        device: torch.device,
        rng_key: RngKey = SAMPLE_KEY,
        progress: LayerProgress | None = None,
        dry: Dry | None = None,
    ) -> None:
        super().__init__(shallow_copy, dry)
        self.trace, self.log, self.device = trace, log, device
        self.last_layer = layers[-1].index
        self.is_last = self.last_layer == len(trace.starts) - 1
        self.begin, self.end = trace.starts[layers[0].index], (*trace.starts, len(trace.ops))[self.last_layer + 1]
        self.made = {one: value for one, value in values.items() if one in wanted and value is not None}
        self._values, self._wanted = values, wanted
        self._progress = progress or LayerProgress()
        self._to_enter = list(layers)
        self._layer = layers[0]
        self._rng_scope = PipeRngScope(rng_key.seed, rng_key.step, self._layer.index, rng_key.micro_batch)
        self._own: Mapping[int, Slot] = {}  # the model's parameters, by identity: where the layer has its own

    def go(self, inputs: Sequence[Any]) -> Any:
        """Interprets; gives the output of the model, if the last layer is among those done."""
        described = zip(self.log[0], inputs, strict=True)
        leaves = [
            self._arrived(ValueId(-1, at), said) if given is None else given
            for at, (said, given) in enumerate(described)
        ]
        args, kwargs = self.trace.inputs.filled(leaves)
        output = None
        with suppress(Enough):
            output = self.run(args, kwargs)
            self._refuse_unlike(output)
        self._enter(self.last_layer)
        self.shallow_copy.refuse_changed_buffers()
        return output

    def _arrived(self, value_id: ValueId, described: Sequence[Any]) -> Any:
        """What came across the cut of an operation before, or of an input, or what stands for it."""
        found: Any = self._values.get(value_id)
        if found is None:
            match described:
                case [dtype, shape, wants_gradient]:
                    found = without_memory(Placeholder, shape, DTYPES[dtype], self.device, wants_gradient)
                case [value]:
                    return value
                case _:
                    return OpaquePlaceholder()
        self.name_as(found, value_id)
        return found

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.at < self.begin:
            return self._collect(name, open_lists(self._outside), self._pass(self._next(name)))
        return super()._unit(name, args, kwargs)

    def _next(self, name: str) -> int:
        """The number of an operation that is called now, which the trace has there too."""
        at, self.at = self.at, self.at + 1
        then = self.trace.ops[at].name if at < len(self.trace.ops) else "the end"
        if then != name:
            raise self._other_path(name, then)
        return at

    def _other_path(self, now: str, then: str) -> CannotSplitError:
        """Makes the error for an operation that the trace does not have; names an input whose size is or was 1."""
        for at, described in enumerate(self.log[0]):
            known, _ = self.trace.layouts.get(ValueId(-1, at), ((), None))
            match described:
                case [_, shape, _] if any(
                    (one == 1) != (other == 1) for one, other in zip(shape, known, strict=False)
                ):
                    return CannotSplitError(OTHER_SIZE.format(now=now, then=then, shape=shape, known=[*known]))
        return CannotSplitError(OTHER_OPS.format(now=now, then=then))

    def op(self, call: OpCall) -> Any:
        """Does an operation, or gives what it brought before."""
        at = self._next(call.name)
        if at < self.begin:
            return self._pass(at)
        self._enter(self.trace.layer_of(at))
        made = self._do_own(call)
        op = self.trace.ops[at]
        leaves, structure = take_apart(made)
        # of other rows, `unbind` gives another number of tensors
        has_rows = type(made) is tuple is op.returns.spec.type and at in self.trace.inside
        is_other = structure is not op.returns and structure != op.returns and not has_rows
        for place, leaf in enumerate(leaves):
            if place in op.again:
                is_other = is_other or self.value_id_of(leaf) != op.again[place]
            elif isinstance(leaf, Tensor):
                value_id = ValueId(at, place)
                self.name_as(leaf, value_id)
                if value_id in self._wanted:
                    self.made[value_id] = leaf
        if is_other:
            raise CannotSplitError(OTHER_VALUE.format(name=call.name))
        if not self.is_last:
            self.log.append(describe(leaves))
            if self.at == self.end:
                raise Enough
        return made

    def _pass(self, at: int) -> Any:
        op = self.trace.ops[at]
        leaves = [self._arrived(ValueId(at, place), described) for place, described in enumerate(self.log[at + 1])]
        for place, (maker, leaf) in op.again.items():
            known = ValueId(maker, leaf), self.log[maker + 1][leaf]
            leaves[place] = leaves[leaf] if maker == at else self._arrived(*known)
        return op.returns.filled(leaves) if len(leaves) == op.returns.spec.num_leaves else tuple(leaves)

    def _do_own(self, call: OpCall) -> Any:
        if Placeholder in map(type, call.tensors):
            _refuse(call.name, "a tensor")
        if OpaquePlaceholder in map(type, (*call.args, *call.kwargs.values())):
            _refuse(call.name, "an object that holds more than tensors")
        with self._layer.aliased, self._rng_scope:
            if self._own and any(id(tensor) in self._own for tensor in call.tensors):
                call = call.given(self._own_parameter)
            try:
                return self.do(call)
            except CannotSplitError as error:
                given = [*enumerate(call.args), *call.kwargs.items()] if call.unit is not None else []
                for at, value in given:
                    if hides_tensors(value, Placeholder):
                        text = HOLDS.format(name=call.name, kind=type(value).__name__, argument=at)
                        raise CannotSplitError(text, error.places) from error
                raise

    def _enter(self, index: int) -> None:
        while self._to_enter and self._to_enter[0].index <= index:
            layer = self._layer = self._to_enter.pop(0)
            self._progress.enter()
            self._rng_scope.set_layer(layer.index)
            self._own = layer.module.own_parameters() if isinstance(layer.module, ModelPart) else {}

    def _own_parameter(self, tensor: Tensor) -> Tensor:
        """A parameter as the layer has it: in place of one that others use too, its alias."""
        if id(tensor) not in self._own:
            return tensor
        holder, leaf = self._own[id(tensor)]
        found = holder._parameters[leaf]
        assert found is not None
        return found

    def _refuse_unlike(self, output: Any) -> None:
        """Refuses another end than that of the trace, and an output that is not whole."""
        if self.at != len(self.trace.ops):
            raise self._other_path("the end", self.trace.ops[self.at].name)
        leaves, structure = take_apart(output)
        if structure != self.trace.output:
            raise CannotSplitError(OTHER_OUTPUT)
        if any(isinstance(leaf, (Placeholder, OpaquePlaceholder)) for leaf in leaves):
            _refuse("the output", "a tensor, or an object that holds some")
