"""What a stage of a traced model does in a straight line, noted while it interprets a micro-batch.

The model's Python is walked once a run and stage. For further micro-batches of the same kinds and shapes the stage
calls what was called then: first what depends on inputs alone, then its units and the functions between them.

    walked      embed  mask  (block  block  add)  norm  head       in brackets: the stage's own operations
    in a line          mask   block  block  add

A program is good for one run: whatever of the model's attributes, settings and globals has changed is seen by the
walk of the next. Numbers that the walk has read from inputs are read again; where one is another, or a call returns
something of another shape, Python is walked from there on.
"""

import enum
import json
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, EllipsisType, FunctionType, MethodDescriptorType, NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gpipe._torch.accelerator import kinds
from gpipe._torch.modes import modes_here
from gpipe.stages.losses import LossReader
from gpipe.stages.stage import Layer
from gpipe.stages.tree import storage_address, version
from gpipe.tracing.interpreter import Enough, StageInterpreter
from gpipe.tracing.parts import ModelPart
from gpipe.tracing.trace import Leaves, OpCall, Structure, ValueId, take_apart

Values: TypeAlias = dict[Hashable, Any]
"""What a micro-batch has brought and made."""
Maker: TypeAlias = Callable[[Values], Any]

CONSTANT = (
    bool, int, float, complex, str, bytes, NoneType, EllipsisType, slice, enum.Enum, type, BuiltinFunctionType,
    MethodDescriptorType, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
"""Kinds of arguments that are the same for each micro-batch."""


class Modes(NamedTuple):
    """What is set in a thread on which results depend."""

    grad: bool
    autocasts: tuple[tuple[str, bool, torch.dtype], ...]
    others: tuple[object, ...]

    @classmethod
    def here(cls) -> "Modes":
        """Reads them."""
        attention = torch.backends.cuda  # of all devices, in spite of its name
        others = (
            torch.is_inference_mode_enabled(),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            attention.flash_sdp_enabled(),
            attention.math_sdp_enabled(),
            attention.mem_efficient_sdp_enabled(),
            *map(str, modes_here(StageInterpreter, LossReader)),
        )
        autocasts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds()]
        return cls(torch.is_grad_enabled(), tuple(autocasts), others)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Has grad mode and autocasts be these."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


class Step(NamedTuple):
    """A call, and what it returned when it was noted."""

    call: Maker
    uses: frozenset[Hashable]
    names: Sequence[Hashable]  # of the leaves of what it returns
    structure: Structure
    seen: Sequence[tuple[object, ...]]  # of each leaf what Python could see of it
    again: Sequence[tuple[int, int]]  # the leaves that are the same as one before them
    drops: Sequence[Hashable] = ()  # what nobody needs behind it

    def keep(self, made: Any, values: Values) -> bool:
        """Adds what the call returned to the values; says whether all that Python could see of it is as it was."""
        if isinstance(made, Tensor) and len(self.names) == 1:
            values[self.names[0]] = made
            return _seen(made) == self.seen[0]
        leaves, structure = take_apart(made)
        values.update(zip(self.names, leaves, strict=False))
        return self.has_parts(leaves, structure) and list(map(_seen, leaves)) == self.seen

    def has_parts(self, leaves: Leaves, structure: Structure) -> bool:
        """Whether a value is put together as what it returned was."""
        return structure == self.structure and all(leaves[at] is leaves[first] for at, first in self.again)

    @property
    def reads(self) -> bool:
        """Whether Python got more than tensors."""
        return any(kind is not Tensor for kind, *_ in self.seen)


def _seen(leaf: Any) -> tuple[object, ...]:
    if isinstance(leaf, Tensor):
        return Tensor, leaf.shape, leaf.dtype, leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, CONSTANT) else None


class Program(NamedTuple):
    """What a stage does with a micro-batch."""

    inputs: Mapping[Hashable, int]  # the leaves of the inputs that are used
    free: Sequence[Step]  # what depends on them alone
    own: Sequence[tuple[int, Sequence[Step]]]  # its operations, by layer
    described: Sequence[list[list[Any]]]  # what is written down of each
    output: Maker | None  # of the last stage
    log: str  # what it hands on, all that it was given included

    def begin(self, inputs: Sequence[Any], values: Values) -> bool:
        """Does what depends on inputs alone; says whether it is as it was."""
        values.update({name: inputs[leaf] for name, leaf in self.inputs.items()})
        return all(step.keep(step.call(values), values) for step in self.free)


class Part(NamedTuple):
    """The layers of a stage, what comes to them, and what is wanted of them."""

    layers: Sequence[Layer]
    given: Collection[ValueId]
    wanted: Collection[ValueId]


class _NotInLineError(Exception):
    """What a stage does cannot be noted."""


class RecordingInterpreter(StageInterpreter):
    """Interprets, and notes what is done for who does it in a line; `program` stays None if that cannot be noted."""

    program: Program | None = None
    ahead: Sequence[Part] = ()
    """Later stages whose programs are noted too: the walk goes on, and nothing of theirs is done."""
    full: Sequence[list[list[Any]]] = ()
    """The log up to their end."""

    def go(self, inputs: Sequence[Any]) -> Any:
        """Interprets; gives the output of the model, if the last layer is among those done."""
        self._modes = Modes.here()
        self._failed = self._writes = False
        self._names: dict[int, Hashable] = {}  # of what has no value id, by identity
        self._named: list[object] = []  # which stay, and so do their identities
        self._free: list[Step] = []
        self._steps: dict[int, list[Step]] = {}
        self._part = Part(tuple(self._to_enter), [*self._values], self.wanted)
        self._output: Any = None
        self._given: set[int] = set()  # where what operations were given lies
        self._uses: set[Hashable] = set()
        self._inputs: dict[Hashable, int] = {("input", at): at for at in range(len(inputs))}
        for at, leaf in enumerate(inputs):
            if isinstance(leaf, Tensor):
                self._name(leaf, ("input", at))
        self._goes_ahead = False
        try:
            output = super().go(inputs)
        except Exception:
            if not self._goes_ahead:
                raise
            self._failed = True  # of other stages, which will walk by themselves
            self._enter(self.last_layer)
            self.shallow_copy.refuse_changed_buffers()
            return None
        if self._goes_ahead:
            return None
        self.program = self._noted(self._part, self.log, output if self.is_last else None)
        return output

    def noted_ahead(self) -> list[Program]:
        """The programs of those stages whose layers are `ahead`; none if they could not be noted."""
        if not self._goes_ahead or self._failed:
            return []
        found = [self._noted(part, self.full, self._output) for part in self.ahead]
        noted = [program for program in found if program is not None]
        return noted if len(noted) == len(found) else []

    def free(self, call: OpCall) -> Any:
        """Does what depends on inputs alone, and notes it."""
        make, before = self._maker_of(call), list(map(version, call.tensors))
        made = super().free(call)
        sets_a_mode = made is None and not call.tensors  # each step is done in the modes that it was done in
        if not self._failed and not sets_a_mode:
            written = [one for one, was in zip(call.tensors, before, strict=True) if version(one) != was]
            self._writes = self._writes or bool(written)
            self._failed = any(storage_address(one) in self._given for one in written)
            step = self._step(make, made, ("free", len(self._free)))
            self._free.append(step)
            for name, leaf in zip(step.names, take_apart(made)[0], strict=True):
                self._name(leaf, name)
                self._failed = self._failed or not isinstance(leaf, (Tensor, CONSTANT))
        return made

    def op(self, call: OpCall) -> Any:
        """Does an operation, or gives what it brought before, or what stands for what it will."""
        self._given.update(storage_address(one) for one in call.tensors if id(one) in self._names)
        return self._op_ahead(call) if self.at >= self.end else super().op(call)

    def _end(self) -> None:
        if self.ahead and not self._failed:
            self.program = self._noted(self._part, self.log, None)
            self._goes_ahead = self.program is not None
        if not self._goes_ahead:
            super()._end()

    def _op_ahead(self, call: OpCall) -> Any:
        at, self.at = self.at, self.at + 1
        layer = self.trace.layer_of(at)
        of = next((one for part in self.ahead for one in part.layers if one.index == layer), None)
        if of is None or self._failed:
            raise Enough
        op, described = self.trace.ops[at], self.full[at + 1]
        self._own = of.module.own_parameters() if isinstance(of.module, ModelPart) else {}
        make = self._maker_of(call)
        leaves = [self._arrived(ValueId(at, place), said) for place, said in enumerate(described)]
        self._failed = self._failed or op.name != call.name or [] in described
        for place, first in op.again:
            leaves[place] = leaves[first]
        made = op.returns.filled(leaves)
        self._steps.setdefault(layer, []).append(self._step(make, made, (at,)))
        if at + 1 == len(self.full) - 1 and at + 1 < len(self.trace.ops):
            raise Enough
        return made

    def _refuse_unlike(self, output: Any) -> None:
        self._output = output
        if not self._goes_ahead:
            super()._refuse_unlike(output)

    def _do_own(self, call: OpCall) -> Any:
        make, before = self._maker_of(call), list(map(version, call.tensors))
        made = super()._do_own(call)
        if not self._failed:
            written = [one for one, was in zip(call.tensors, before, strict=True) if version(one) != was]
            self._failed = any(self.value_id_of(one) is None for one in written)  # else later steps would come before
            step = self._step(make, made, (self.at - 1,))
            self._steps.setdefault(self._layer.index, []).append(step)
            for name, leaf in zip(step.names, take_apart(made)[0], strict=True):
                if not isinstance(leaf, (Tensor, CONSTANT)):
                    self._name(leaf, name)
        return made

    def _name(self, value: object, name: Hashable) -> None:
        self._names[id(value)] = name
        self._named.append(value)

    def _step(self, make: Maker, made: Any, at: tuple[object, ...]) -> Step:
        leaves, structure = take_apart(made)
        first: dict[int, int] = {}
        again = [
            (place, first[id(leaf)])
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and first.setdefault(id(leaf), place) < place
        ]
        names = [(*at, place) for place in range(len(leaves))]  # as value ids are made
        uses, self._uses = frozenset(self._uses), set()
        return Step(make, uses, names, structure, list(map(_seen, leaves)), again)

    def _maker_of(self, call: OpCall) -> Maker:
        """Makes the call again, in the modes that it is made in."""
        function, modes = call.func, Modes.here()
        try:
            if modes.others != self._modes.others:
                raise _NotInLineError
            args = [self._made_by(value) for value in call.args]
            kwargs = {name: self._made_by(value) for name, value in call.kwargs.items()}
        except _NotInLineError:
            self._failed = True
            return _never

        def make(values: Values) -> Any:
            given = [constant if made is None else made(values) for made, constant in args]
            named = {name: constant if made is None else made(values) for name, (made, constant) in kwargs.items()}
            return function(*given, **named)

        def make_inside(values: Values) -> Any:
            with modes.inside():
                return make(values)

        return make if modes == self._modes else make_inside

    def _made_by(self, value: Any) -> tuple[Maker | None, Any]:
        """What makes an argument of values; of one that is always the same None, and the argument."""
        if isinstance(value, Tensor):
            return self._tensor_made_by(value)
        if type(value) in (tuple, list, dict):
            items = value.items() if type(value) is dict else enumerate(value)
            made = [(key, *self._made_by(item)) for key, item in items]
            if type(value) is tuple and all(make is None for _, make, _ in made):
                return None, value
            if type(value) is dict:
                return lambda values: {key: was if make is None else make(values) for key, make, was in made}, None
            kind = type(value)
            return lambda values: kind([was if make is None else make(values) for _, make, was in made]), None
        if value == self.device and isinstance(value, torch.device):
            return itemgetter("device"), None
        if id(value) in self._names and not isinstance(value, CONSTANT):
            self._uses.add(self._names[id(value)])
            return itemgetter(self._names[id(value)]), None
        if isinstance(value, slice):
            make, _ = self._made_by((value.start, value.stop, value.step))
            return (None, value) if make is None else (lambda values: slice(*make(values)), None)
        if isinstance(value, CONSTANT) or (isinstance(value, FunctionType) and value.__closure__ is None):
            return None, value
        leaves, structure = take_apart(value)
        if any(leaf is value for leaf in leaves):
            raise _NotInLineError
        inside, _ = self._made_by(leaves)
        assert inside is not None
        return lambda values: structure.filled(inside(values)), None

    def _tensor_made_by(self, tensor: Tensor) -> tuple[Maker | None, Any]:
        if id(tensor) in self._own:
            holder, leaf = self._own[id(tensor)]
            return lambda _: holder._parameters[leaf], None
        value_id = self.value_id_of(tensor)
        name = self._names.get(id(tensor)) if value_id is None else value_id
        if name is not None:
            self._uses.add(name)
            return itemgetter(name), None
        for name, copy in self.shallow_copy.copies.items():
            if any(tensor is value for value in vars(copy).values()):
                return None, tensor
            for key, buffer in copy._buffers.items():
                if buffer is tensor:
                    return partial(_buffer_of, name, key), None
        raise _NotInLineError

    def _noted(self, part: Part, log: Sequence[list[list[Any]]], output: Any) -> Program | None:
        """The program of a stage; that of the last gives the output, and the log of others goes on."""
        layers, given, wanted = part
        first, last, starts = layers[0].index, layers[-1].index, (*self.trace.starts, len(self.trace.ops))
        self._uses = set()
        make: Maker | None = None
        if last == len(self.trace.starts) - 1:
            try:
                make, constant = self._made_by(output)
            except _NotInLineError:
                self._failed = True
            make = make or (lambda _: constant)
        if self._failed:
            return None
        own = _dropping([(layer.index, self._steps.get(layer.index, [])) for layer in layers], {*self._uses, *wanted})
        needed = self._uses.union(*(step.uses for _, steps in own for step in steps))
        free = []
        for step in reversed(self._free):
            if self._writes or step.reads or not needed.isdisjoint(step.names):
                free.append(step)
                needed |= step.uses
        made = {name for some in (free, *(steps for _, steps in own)) for step in some for name in step.names}
        if not needed <= {*self._inputs, *given, *made}:  # what was changed in place is there by its name before
            self._failed = True
            return None
        inputs = {name: at for name, at in self._inputs.items() if name in needed}
        begin, end = starts[first] + 1, starts[last + 1] + 1
        return Program(inputs, free[::-1], own, log[begin:end], make, json.dumps(log[:end]))


def _dropping(own: Sequence[tuple[int, Sequence[Step]]], kept: set[Hashable]) -> list[tuple[int, list[Step]]]:
    """The steps, each of which drops what they make and use, but for what is kept, as soon as none needs it."""
    made = {name for _, steps in own for step in steps for name in step.names}
    found: list[tuple[int, list[Step]]] = []
    for layer, steps in reversed(own):
        dropping: list[Step] = []
        for step in reversed(steps):
            last = made.intersection({*step.uses, *step.names}) - kept
            dropping.append(step._replace(drops=tuple(last)))
            kept = kept | last
        found.append((layer, dropping[::-1]))
    return found[::-1]


def _buffer_of(name: str, key: str, values: Values) -> Tensor | None:
    copy: nn.Module = values["copies"][name]
    return copy._buffers[key]


def _never(values: Values) -> Any:
    raise AssertionError("it was not noted")
