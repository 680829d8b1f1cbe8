"""Finds the path that a model takes in generation: its operations, and which layer fills which part of the cache.

A forward of one micro-batch passes along it from stage to stage.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from gpipe._torch.dispatcher import is_fake
from gpipe._torch.trees import map_tensors
from gpipe.generation import caches
from gpipe.generation.caches import Layout, Place, copy_of_cache, is_cache, layers_in, marks
from gpipe.stages.digest import differ, digest
from gpipe.stages.stage import Layer, LayerProgress, RngKey, Stage
from gpipe.stages.tree import Tree, tensors_in
from gpipe.tracing.interpreter import StageInterpreter, describe
from gpipe.tracing.meta_model import DryRun, as_kind_of, lacks_values, on_cpu, replaced_tensors, zeros
from gpipe.tracing.model import TracedModel
from gpipe.tracing.parts import ModelPart, Parts
from gpipe.tracing.proof import compare
from gpipe.tracing.runs import ForwardArguments, unchanged
from gpipe.tracing.shallow_copy import ShallowCopy
from gpipe.tracing.trace import CannotSplitError, OpCall, Trace, ValueId, take_apart
from gpipe.tracing.tracer import Tracer

ELSEWHERE = (
    "in generation the forward of the {model} goes another way through its layers than on the sample: {name} comes "
    "behind {layer}. Generate by the model itself, or make the pipe with a sample that takes this way"
)
SHARES = (
    "in generation {one} and {other} of the {model} fill the same part of its cache, and each rank keeps that of its "
    "own layers. Generate by the model itself, or name both as one block: blocks=[...]"
)
OTHER_CACHE = (
    "in layers, the {model} leaves other values in its cache than by itself, in layer {at}: something between blocks "
    "writes it. Generate by the model itself"
)
KEPT = (
    "in generation the {model} keeps what it has seen in its modules ({places}) and not in a cache that it is given, "
    "and micro-batches follow each other through them. Generate by the model itself"
)
MAKES = (
    "in generation the forward of the {model} makes its cache itself, and each rank would make another. Generate by "
    "the model itself, or with use_cache=False"
)
KEY = RngKey(0, 0, 0)  # nothing is drawn in evaluation


Interpreters: TypeAlias = Callable[
    [Trace, Mapping[ValueId, Any], list[list[list[Any]]], frozenset[ValueId]], StageInterpreter
]
"""Makes what does the operations of some layers: from what came to them, its log, and what is wanted of them."""


class Path(NamedTuple):
    """A path of a model in generation."""

    trace: Trace  # its layers are those of the pipe; some may do nothing on it
    fills: Mapping[Place, int]  # the layer of the pipe that fills each layer of the cache
    caches: frozenset[int]  # the leaves of the output that are the cache

    def filled_by(self, layers: Sequence[int]) -> frozenset[Place]:
        """What these layers of the pipe fill of the cache."""
        return frozenset(place for place, layer in self.fills.items() if layer in layers)


def cache_in(given: ForwardArguments) -> Any:
    """The cache among the arguments of a forward, if there is one."""
    return next(filter(is_cache, take_apart(tuple(given))[0]), None)


@dataclass
class Passing:
    """A forward, as it came to a stage; `output` is what it gave behind the last."""

    path: Path
    inputs: list[Any]
    cache: Any
    before: Mapping[Place, Any]  # stand-ins for what the cache held when it began
    log: list[list[list[Any]]]
    live: Mapping[ValueId, Any]
    output: Any = None
    layouts: dict[Place, Layout] = field(default_factory=dict)  # of what was filled since

    @classmethod
    def begin(cls, path: Path, given: ForwardArguments) -> Self:
        leaves, _ = take_apart(tuple(given))
        cache = cache_in(given)
        live = {value_id: leaves[value_id.leaf] for value_id in path.trace.carried}
        inputs = [None if ValueId(-1, at) in live else leaf for at, leaf in enumerate(leaves)]
        return cls(path, inputs, cache, {} if cache is None else caches.stand_ins(cache), [describe(leaves)], live)

    def through(self, layers: Sequence[int], device: torch.device, make: Interpreters, *, tells: bool) -> None:
        """Has consecutive layers, on a device, do what is theirs; notes for others what they fill, if it `tells`."""
        trace, last = self.path.trace, layers[-1]
        leaving = trace.live_before(last + 1)
        ends = (*trace.starts, len(trace.ops))
        if ends[layers[0]] == ends[last + 1] and last + 1 < len(trace.starts):  # nothing is
            self.live = {value_id: self.live.get(value_id) for value_id in leaving}
            return
        live, inputs = map_tensors((dict(self.live), self.inputs), lambda tensor: tensor.to(device))
        interpreter = make(trace, live, self.log, frozenset(leaving))
        own = self.path.filled_by(layers)
        with nullcontext() if self.cache is None else caches.seen_by(self.cache, own, self.before):
            self.output = interpreter.interpret(inputs)
        self.live = {value_id: interpreter.produced.get(value_id) for value_id in leaving}
        if tells and self.cache is not None:
            self.layouts |= {
                place: caches.layout_of(layer) for place, layer in layers_in(self.cache).items() if place in own
            }

    # Between processes.

    def message(self) -> dict[str, Tree]:
        """What the process of the next stage needs to go on."""
        return {"log": json.dumps(self.log), "live": list(self.live.values()), "caches": self._told()}

    def arrive(self, first: int, message: Any) -> None:
        """Goes on before the stage that begins with this layer, where another process has left off."""
        self.log = json.loads(message["log"])
        self.live = dict(zip(self.path.trace.live_before(first), message["live"], strict=True))
        self.layouts = _heard(message)

    def result(self) -> dict[str, Tree]:
        """What all processes need of the output."""
        leaves, _ = take_apart(self.output)
        return {
            "output": [None if at in self.path.caches else leaf for at, leaf in enumerate(leaves)],
            "caches": self._told(),
        }

    def end(self, own: Collection[Place], message: Any) -> Any:
        """The output of a message, with the own cache in it, in which what is not one's own is as it is elsewhere."""
        if self.cache is not None:
            heard = _heard(message)
            caches.put_stand_ins(self.cache, {place: heard[place] for place in sorted(heard) if place not in own})
        leaves = [self.cache if at in self.path.caches else leaf for at, leaf in enumerate(message["output"])]
        return self.path.trace.output.filled(leaves)

    def _told(self) -> str:
        return json.dumps([[*place, layout] for place, layout in self.layouts.items()])


def _heard(message: Any) -> dict[Place, Layout]:
    return {(part, at): layout for part, at, layout in json.loads(message["caches"])}


class _CacheTracer(Tracer):
    """Notes beside which operations fill which layer of a cache."""

    def __init__(self, shallow_copy: ShallowCopy, dry: DryRun | None, cache: Any) -> None:
        super().__init__(shallow_copy, dry)
        self._cache = cache
        self.filled: dict[Place, list[int]] = {}

    def execute(self, call: OpCall) -> Any:
        """Does what an operation is; a unit that fails without values runs again, with the cache as it was."""
        cache, dry = self._cache, self.dry
        if cache is None:
            return super().execute(call)
        before = marks(cache)
        if dry is not None:
            was = copy_of_cache(cache, zeros)

            def again() -> None:
                nonlocal before
                caches.put_back(cache, was)
                before = marks(cache)

            dry.before_retry = again
        made = super().execute(call)
        for place, mark in marks(cache).items():
            if mark != before.get(place, []):
                self.filled.setdefault(place, []).append(self.op_index)
        if dry is not None:
            caches.put_back(cache, copy_of_cache(cache, partial(_layout, dry)))
        return made


def _layout(dry: DryRun, tensor: Tensor) -> Tensor:
    """Numbers without values; lengths, which are whole, with theirs."""
    return dry.like(tensor) if (tensor.is_floating_point() or tensor.is_meta) and not is_fake(tensor) else tensor


def find_path(
    traced: TracedModel, given: ForwardArguments, stages: Sequence[Stage], known: Mapping[Place, int]
) -> Path:
    """The path of a forward with these arguments: traced, and, where the model has its values, proven.

    Other paths are `known` to fill some of the cache, which this one may only read.

    Raises:
        CannotSplitError: It cannot be done in these layers.
    """
    model = traced.model
    if lacks_values(model):  # no process has all of them
        return foretell(traced, given, known).path
    with unchanged(model), torch.no_grad(), replaced_tensors(model, on_cpu):
        given = _apart(given, on_cpu)
        path = _traced(traced, given, known, None).path
        _prove(traced, given, path, stages)
        return path


class Foretold(NamedTuple):
    """A forward without values: its path, the output and the cache as they would be."""

    path: Path
    output: Any
    cache: Any


def foretell(traced: TracedModel, given: ForwardArguments, known: Mapping[Place, int]) -> Foretold:
    """Runs a forward without values."""
    model, dry = traced.model, DryRun()
    given = _apart(given, partial(_layout, dry))
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Linear) and not module.weight.is_floating_point():  # bitsandbytes packs it
                own = {name: one for name, one in vars(module).items() if name == "forward"}
                stack.callback(vars(module).update, own)
                stack.callback(vars(module).pop, "forward")
                vars(module)["forward"] = lambda value, n=module.out_features: value.new_empty((*value.shape[:-1], n))
        with replaced_tensors(model, _on_meta), unchanged(model), torch.no_grad(), dry.fake_tensors(model):
            return _traced(traced, given, known, dry)


def _on_meta(tensor: Tensor) -> Tensor:
    """Parameters, which other processes hold some of, all alike without values."""
    if not isinstance(tensor, nn.Parameter):
        return tensor
    layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return as_kind_of(tensor, layout)


def _apart(given: ForwardArguments, change: Callable[[Tensor], Tensor] = Tensor.clone) -> ForwardArguments:
    """The same arguments with a cache and tensors of their own."""
    leaves, structure = take_apart(tuple(given))
    for at, leaf in enumerate(leaves):
        if is_cache(leaf):
            leaves[at] = copy_of_cache(leaf, change)
        elif isinstance(leaf, Tensor):
            leaves[at] = change(leaf)
    return ForwardArguments(*structure.filled(leaves))


def _traced(traced: TracedModel, given: ForwardArguments, known: Mapping[Place, int], dry: DryRun | None) -> Foretold:
    given = _apart(given)
    cache = cache_in(given)
    tracer = _CacheTracer(ShallowCopy(traced.parts), dry, cache)
    before = _tensors_kept(traced.model)
    output, trace = tracer.trace(*given)
    if kept := [name for name, it in _tensors_kept(traced.model).items() if before.get(name) != it]:
        raise CannotSplitError(KEPT.format(model=type(traced.model).__name__, places=", ".join(kept[:3])))
    trace = replace(trace, starts=_starts(trace, traced.parts, list(traced.layers.items())))
    fills = dict(known)
    for place, ops in tracer.filled.items():
        for op in ops:
            if fills.setdefault(place, trace.layer_of(op)) != trace.layer_of(op):
                one = list(traced.layers)[fills[place]]
                raise CannotSplitError(
                    SHARES.format(model=type(traced.model).__name__, one=one, other=trace.ops[op].name)
                )
    given_back = frozenset(at for at, leaf in enumerate(take_apart(output)[0]) if is_cache(leaf))
    if given_back and cache is None:
        raise CannotSplitError(MAKES.format(model=type(traced.model).__name__))
    return Foretold(Path(trace, fills, given_back), output, cache)


def _tensors_kept(model: nn.Module) -> dict[str, int]:
    return {
        f"{path}.{name}".lstrip("."): id(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _starts(trace: Trace, parts: Parts, layers: Sequence[tuple[str, ModelPart]]) -> tuple[int, ...]:
    """The first operation of each layer of the pipe on a trace, which may leave some out."""
    starts, at = [0], 0
    for number, op in enumerate(trace.ops):
        needed, behind = {op.name, *op.inner} if op.is_unit else set(), at
        while not (needed <= {*layers[at][1].units} and {*op.raw} <= layers[at][1].raw.keys()):
            if at == len(layers) - 1:
                model, layer = type(parts.model).__name__, layers[behind][0]
                raise CannotSplitError(ELSEWHERE.format(model=model, name=op.name, layer=layer))
            at += 1
        starts += [number] * (at + 1 - len(starts))
        if op.is_unit and op.name in parts.blocks and at < len(layers) - 1:
            at += 1
    return (*starts, *[len(trace.ops)] * (len(layers) - len(starts)))


def _prove(traced: TracedModel, given: ForwardArguments, path: Path, stages: Sequence[Stage]) -> None:
    """Compares what the layers of one stage after another give with what the model gives, to the last bit."""
    theirs, ours = _apart(given), _apart(given)
    expected = traced.model(*theirs.args, **theirs.kwargs)
    passing, shallow_copy = Passing.begin(path, ours), ShallowCopy(traced.parts)
    for stage in stages:
        shallow_copy.refresh()
        layers = [Layer(layer.index, str(layer), traced.model) for layer in stage.layers]
        make = partial(_interpreter, shallow_copy, layers)
        passing.through([layer.index for layer in layers], torch.device("cpu"), make, tells=False)
    model = traced.model
    compare(model, *(_without_caches(path, output) for output in (expected, passing.output)))
    one, other = (layers_in(cache) if (cache := cache_in(some)) is not None else {} for some in (ours, theirs))
    for place in sorted({*one, *other}):
        pair = [digest([tensors_in(list(vars(some[place]).values()))]) for some in (one, other)]
        if differ(*pair):
            raise CannotSplitError(OTHER_CACHE.format(model=type(model).__name__, at=place[1]))


def _interpreter(
    shallow_copy: ShallowCopy, layers: Sequence[Layer], trace: Trace, values: Any, log: Any, wanted: Any
) -> StageInterpreter:
    cpu = torch.device("cpu")
    return StageInterpreter(shallow_copy, trace, layers, values, log, wanted, cpu, KEY, LayerProgress())


def _without_caches(path: Path, output: Any) -> Any:
    leaves, structure = take_apart(output)
    return structure.filled([None if at in path.caches else leaf for at, leaf in enumerate(leaves)])
