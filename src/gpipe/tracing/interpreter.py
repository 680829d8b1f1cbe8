"""Walks through a model's forward and sees its events: calls of units, and operations between them.

Replays some layers of a model: its forward runs from the top, but only their events are done.

What events before brought is taken from what crossed the cut; behind the last event of its own the walk stops.
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
from gpipe.tracing.parts import Segment
from gpipe.tracing.shallow_copy import Skeleton
from gpipe.tracing.trace import Call, Path
from gpipe.tracing.values import (
    Absent,
    CannotSplitError,
    Tag,
    Unknown,
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
"""Functions of torch that draw random numbers: they are events, whatever they are given."""


class Walk(TorchFunctionMode):
    """One run of a forward on a skeleton, event by event; `dry` does the events of a model without values."""

    def __init__(self, skeleton: Skeleton, dry: Dry | None = None) -> None:
        super().__init__()
        self.skeleton = skeleton
        self.dry = dry
        self.at = 0  # the number of the next event
        self._in_unit = False
        self._tags: dict[int, tuple[weakref.ref[Tensor], Tag]] = {}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the model."""
        self.skeleton.on_call = self._unit
        try:
            with self:
                return self.skeleton.root(*args, **kwargs)
        finally:
            self.skeleton.on_call = None

    def tag_of(self, tensor: Tensor) -> Tag | None:
        """What a tensor is called that an event made; None of any other."""
        found = self._tags.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def name_as(self, tensor: Tensor, tag: Tag) -> None:
        """Has a tensor be known by a tag."""
        self._tags[id(tensor)] = weakref.ref(tensor), tag

    def depends(self, tensor: Tensor) -> bool:
        """Whether an operation on a tensor is an event."""
        return self.tag_of(tensor) is not None or isinstance(tensor, nn.Parameter) or tensor.requires_grad

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
        call = Call.of(getattr(func, "__name__", str(func)), func, args, given)
        if call.name not in RANDOM and not any(map(self.depends, call.tensors)):
            return self.free(call)
        if call.name == "__iter__":
            return iter(self.event(call._replace(name="unbind", func=_parts_of)))
        return self.event(call)

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.skeleton.units[name]
        if self._in_unit:
            return unit(*args, **kwargs)
        self._in_unit = True
        try:
            with paused(self):
                return self.event(Call.of(name, unit, args, kwargs))
        finally:
            self._in_unit = False

    def do(self, call: Call) -> Any:
        """Does what an event is."""
        return call.do() if self.dry is None else self.dry.do(call)

    def free(self, call: Call) -> Any:
        """Does an operation that depends on whole numbers of the inputs alone."""
        return call.do()

    @abstractmethod
    def event(self, call: Call) -> Any:
        """Does the next event, or says what comes of it."""


def _parts_of(tensor: Tensor) -> list[Tensor]:
    return list(torch.unbind(tensor))


OTHER_PATH = (
    "the forward takes another path than on the sample: {now} where {then} came. A branch on a value, a dropped "
    "layer or a changed setting leads elsewhere. Name the modules inside of which it branches (of a mixture of "
    "experts, the one that chooses among them): blocks=[...], with names as in model.named_modules(); or give a "
    "sample that takes the path of training, and one path alone"
)
OTHER_VALUE = "{name} returns another structure than on the sample; let it return the same with every input"
OTHER_OUTPUT = (
    "the model's output has other parts than it has by itself on the sample. What is collected on the way from "
    "inside of blocks (output_hidden_states, output_attentions, output_router_logits) is not seen by a replay: leave "
    "it out of what the model is given, and of model.config"
)
NOT_THERE = (
    "{name} needs a value that an earlier layer made, and that did not cross the cuts: on the sample it was not "
    "needed here, or it is of a kind that cannot cross ({kind}). Let blocks hand on tensors, in tuples, lists, "
    "dicts or dataclasses, or name other blocks: blocks=[...]"
)
Values: TypeAlias = Mapping[Tag, Tensor | None]


class Enough(BaseException):
    """Ends a walk behind its last event."""


class Replay(Walk):
    """One walk that does the events of some layers.

    Args:
        skeleton: What is walked through.
        path: The way to go.
        layers: Those whose events are done, consecutive.
        values: What crossed the cut.
        log: What the events before returned, inputs first; it grows.
        wanted: What is asked of these layers.
        device: Where tensors are.
        rng_key: When this is.
        progress: Is told how far the walk got.
        dry: Does the events of a model without values.

    Attributes:
        made: What was wanted, as far as there is a tensor.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        path: Path,
        layers: Sequence[Layer],
        values: Values,
        log: list[list[Any]],
        wanted: frozenset[Tag],
        device: torch.device,
        rng_key: RngKey,
        progress: LayerProgress,
        dry: Dry | None = None,
    ) -> None:
        super().__init__(skeleton, dry)
        self.path, self.layers, self.log, self.device = path, layers, log, device
        self.begin, self.end = path.events_of(layers[0].index, layers[-1].index)
        self.is_last = layers[-1].index == len(path.starts) - 1
        self.made = {tag: value for tag, value in values.items() if tag in wanted and value is not None}
        self._values, self._wanted, self._key, self._progress = values, wanted, rng_key, progress
        self._raw = {
            id(module._parameters[leaf]): name
            for layer in layers
            if isinstance(layer.module, Segment)
            for name, (_, places) in layer.module.raw.items()
            for module, leaf in places
        }
        self._entered = -1
        self._rng_scope: PipeRngScope | None = None
        self._slots: Mapping[str, tuple[Slot, Sequence[Slot]]] = {}

    def go(self, inputs: Sequence[Any]) -> Any:
        """Walks; gives the output of the model, if the last layer is among those done."""
        leaves = [
            self._leaf(Tag(-1, at), described, leaf)
            for at, (described, leaf) in enumerate(zip(self.log[0], inputs, strict=True))
        ]
        args, kwargs = self.path.inputs.filled(leaves)
        try:
            output = self.run(args, kwargs)
        except Enough:
            output = None
        else:
            self._check(output)
        self._enter(self.layers[-1].index)
        self.skeleton.refuse_changed_buffers()
        return output

    def _leaf(self, tag: Tag, described: Sequence[Any], found: Any = None) -> Any:
        """What comes of a leaf of an event before, or of an input."""
        if found is None:
            found = self._values.get(tag)
            if found is None:
                found = stand_in(described, tag, self.device)
            if isinstance(found, Tensor):
                self.name_as(found, tag)
        return found

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.at < self.begin and not self._in_unit:
            return self._pass(name)
        return super()._unit(name, args, kwargs)

    def event(self, call: Call) -> Any:
        """Does an event, or gives what it brought before."""
        name = call.name
        if self.at < self.begin:
            return self._pass(name)
        at = self._next(name)
        self._enter(self.path.layer_of(at))
        _refuse_absent(call)
        layer = self.layers[self._entered - self.layers[0].index]
        assert self._rng_scope is not None
        with layer.aliased, self._rng_scope:
            if any(id(tensor) in self._raw for tensor in call.tensors):
                call = call.given(self._own_parameter)
            made = self.do(call)
        leaves, structure = take_apart(made)
        event = self.path.events[at]
        parted = any(leaves[place] is not leaves[first] for place, first in event.again)
        if parted or (structure is not event.returns and structure != event.returns):
            raise CannotSplitError(OTHER_VALUE.format(name=name))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                tag = Tag(at, place)
                self.name_as(leaf, tag)
                if tag in self._wanted:
                    self.made[tag] = leaf
        self.log.append(describe(leaves))
        if self.at == self.end and not self.is_last:
            raise Enough
        return made

    def _pass(self, name: str) -> Any:
        at = self._next(name)
        event = self.path.events[at]
        leaves = [self._leaf(Tag(at, place), found) for place, found in enumerate(self.log[at + 1])]
        for place, first in event.again:
            leaves[place] = leaves[first]
        return event.returns.filled(leaves)

    def _next(self, name: str) -> int:
        """The number of the event that begins, which must be the recorded one."""
        at, self.at = self.at, self.at + 1
        then = self.path.events[at].name if at < len(self.path.events) else "the end"
        if then != name:
            raise CannotSplitError(OTHER_PATH.format(now=name, then=then))
        return at

    def _enter(self, index: int) -> None:
        """Enters the layers up to this one."""
        for layer in self.layers:
            if self._entered < layer.index <= index:
                self._progress.enter()
                self._entered = layer.index
                key = self._key
                self._rng_scope = PipeRngScope(key.seed, key.step, layer.index, key.micro_batch)
                self._slots = layer.module.raw if isinstance(layer.module, Segment) else {}

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
        """Checks that the walk came to the end of the path, and that the output is whole."""
        if self.at != len(self.path.events):
            raise CannotSplitError(OTHER_PATH.format(now="the end", then=self.path.events[self.at].name))
        leaves, structure = take_apart(output)
        if structure != self.path.output:
            raise CannotSplitError(OTHER_OUTPUT)
        if any(isinstance(leaf, (Absent, Unknown)) for leaf in leaves):
            _refuse("the output", "a tensor, or an object that holds some")


def _refuse_absent(call: Call) -> None:
    if any(type(tensor) is Absent for tensor in call.tensors):
        _refuse(call.name, "a tensor")
    if any(isinstance(value, Unknown) for value in (*call.args, *call.kwargs.values())):
        _refuse(call.name, "an object that holds more than tensors")


def _refuse(name: str, kind: str) -> Never:
    raise CannotSplitError(NOT_THERE.format(name=name, kind=kind))
