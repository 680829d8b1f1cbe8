"""Finds the path of a model in generation: the operations, and the layer that fills each layer of the cache.

The forward of a micro-batch runs along its path from stage to stage.
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
from gpipe.generation.caches import Layout, Place, copy_of_cache, fingerprints, is_cache, layers_in
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

OTHER_ORDER = (
    "{model}: in generation, the forward runs {name} after {layer}, in a different order than on the sample. Call "
    "model.generate without a pipe, or create the pipe with a sample that has this order. [generation-order-differs]"
)
SHARED_CACHE_LAYER = (
    "{model}: in generation, {first} and {second} fill the same layer of the cache. Put both in one block with "
    "blocks=[...], or call model.generate without a pipe. [generation-shares-cache]"
)
OTHER_CACHE = (
    "{model}: in generation, layer {index} of the cache has different values when the model is split. Call "
    "model.generate without a pipe. [generation-cache-differs]"
)
STATE_IN_MODULES = (
    "{model}: in generation, modules keep state between forwards ({places}), which all micro-batches would share. "
    "Call model.generate without a pipe. [generation-state-in-modules]"
)
CACHE_IN_FORWARD = (
    "{model}: in generation, the forward creates its own cache on each rank. Pass use_cache=False, or call "
    "model.generate without a pipe. [generation-creates-cache]"
)
KEY = RngKey(0, 0, 0)
"""An arbitrary random key, because layers draw no random numbers in evaluation mode."""


Interpreters: TypeAlias = Callable[
    [Trace, Mapping[ValueId, Any], list[list[list[Any]]], frozenset[ValueId]], StageInterpreter
]
"""Creates an interpreter of some layers from the trace, the received values, the log, and the values to send."""


class Path(NamedTuple):
    """A path of a model in generation.

    Attributes:
        trace: The operations, by the layers of the pipe. A layer can have no operation on a path.
        fills: The layer of the pipe that fills each layer of the cache.
        caches: The indices of output leaves that are the cache.
    """

    trace: Trace
    fills: Mapping[Place, int]
    caches: frozenset[int]

    def filled_by(self, layers: Sequence[int]) -> frozenset[Place]:
        """Returns the layers of the cache that some layers of the pipe fill."""
        return frozenset(place for place, layer in self.fills.items() if layer in layers)


def cache_in(arguments: ForwardArguments) -> Any:
    """Returns the cache among the arguments of a forward, or None."""
    return next(filter(is_cache, take_apart(tuple(arguments))[0]), None)


@dataclass
class StagedForward:
    """A forward of one micro-batch that runs from stage to stage.

    Attributes:
        path: The path.
        inputs: The leaves of the arguments that all stages use.
        cache: The cache, or None.
        placeholders: Placeholders for the layers of the cache, as they were before the forward.
        log: Descriptions of the values that operations returned, for the next stages.
        live: The values that the next stages use.
        output: The output, after the last stage.
        layouts: The layouts of the layers of the cache that have been filled so far.
    """

    path: Path
    inputs: list[Any]
    cache: Any
    placeholders: Mapping[Place, Any]
    log: list[list[list[Any]]]
    live: Mapping[ValueId, Any]
    output: Any = None
    layouts: dict[Place, Layout] = field(default_factory=dict)

    @classmethod
    def begin(cls, path: Path, arguments: ForwardArguments) -> Self:
        """Creates the forward before its first stage."""
        leaves, _ = take_apart(tuple(arguments))
        cache = cache_in(arguments)
        live = {value_id: leaves[value_id.leaf] for value_id in path.trace.carried}
        inputs = [None if ValueId(-1, index) in live else leaf for index, leaf in enumerate(leaves)]
        placeholders = {} if cache is None else caches.placeholders(cache)
        return cls(path, inputs, cache, placeholders, [describe(leaves)], live)

    def run(self, layers: Sequence[int], device: torch.device, make: Interpreters, *, records_layouts: bool) -> None:
        """Runs consecutive layers on one device.

        Args:
            layers: The indices of the layers.
            device: The device.
            make: A function that creates the interpreter.
            records_layouts: Whether to record which layers of the cache were filled, for other processes.
        """
        trace, last = self.path.trace, layers[-1]
        leaving = trace.live_before(last + 1)
        ends = (*trace.starts, len(trace.ops))
        if ends[layers[0]] == ends[last + 1] and last + 1 < len(trace.starts):  # These layers have no operations.
            self.live = {value_id: self.live.get(value_id) for value_id in leaving}
            return
        live, inputs = map_tensors((dict(self.live), self.inputs), lambda tensor: tensor.to(device))
        interpreter = make(trace, live, self.log, frozenset(leaving))
        own = self.path.filled_by(layers)
        with (
            nullcontext() if self.cache is None else caches.remote_layers_replaced(self.cache, own, self.placeholders)
        ):
            self.output = interpreter.interpret(inputs)
        self.live = {value_id: interpreter.produced.get(value_id) for value_id in leaving}
        if records_layouts and self.cache is not None:
            self.layouts |= {
                place: caches.layout_of(layer) for place, layer in layers_in(self.cache).items() if place in own
            }

    # Between processes.

    def message(self) -> dict[str, Tree]:
        """Returns the state that the process of the next stage needs."""
        return {"log": json.dumps(self.log), "live": list(self.live.values()), "caches": self._encoded_layouts()}

    def receive(self, first: int, message: Any) -> None:
        """Continues a forward whose earlier layers a different process has run.

        Args:
            first: The first layer to run next.
            message: The `message` of the other process.
        """
        self.log = json.loads(message["log"])
        self.live = dict(zip(self.path.trace.live_before(first), message["live"], strict=True))
        self.layouts = _decode_layouts(message)

    def result(self) -> dict[str, Tree]:
        """Returns the output without the cache, and the layouts of the cache, for all processes."""
        leaves, _ = take_apart(self.output)
        return {
            "output": [None if index in self.path.caches else leaf for index, leaf in enumerate(leaves)],
            "caches": self._encoded_layouts(),
        }

    def end(self, own: Collection[Place], message: Any) -> Any:
        """Returns the output of a `result`, with this process's cache in it.

        Args:
            own: The layers of the cache that this process fills. All other layers become placeholders.
            message: The `result` from the process of the last stage.
        """
        if self.cache is not None:
            layouts = _decode_layouts(message)
            remote = {place: layouts[place] for place in sorted(layouts) if place not in own}
            caches.put_placeholders(self.cache, remote)
        leaves = [self.cache if index in self.path.caches else leaf for index, leaf in enumerate(message["output"])]
        return self.path.trace.output.filled(leaves)

    def _encoded_layouts(self) -> str:
        return json.dumps([[*place, layout] for place, layout in self.layouts.items()])


def _decode_layouts(message: Any) -> dict[Place, Layout]:
    return {(part, index): layout for part, index, layout in json.loads(message["caches"])}


class _CacheTracer(Tracer):
    """Traces a forward and records which operations fill each layer of a cache."""

    def __init__(self, shallow_copy: ShallowCopy, dry: DryRun | None, cache: Any) -> None:
        super().__init__(shallow_copy, dry)
        self._cache = cache
        self.filled: dict[Place, list[int]] = {}

    def execute(self, call: OpCall) -> Any:
        """Executes an operation. If a unit fails without values, restores the cache before the unit runs again."""
        cache, dry = self._cache, self.dry
        if cache is None:
            return super().execute(call)
        before = fingerprints(cache)
        if dry is not None:
            saved = copy_of_cache(cache, zeros)

            def restore_cache() -> None:
                nonlocal before
                caches.restore(cache, saved)
                before = fingerprints(cache)

            dry.before_retry = restore_cache
        result = super().execute(call)
        for place, fingerprint in fingerprints(cache).items():
            if fingerprint != before.get(place, []):
                self.filled.setdefault(place, []).append(self.op_index)
        if dry is not None:
            caches.restore(cache, copy_of_cache(cache, partial(_without_values, dry)))
        return result


def _without_values(dry: DryRun, tensor: Tensor) -> Tensor:
    """Removes the values of a floating-point tensor. Integer tensors, such as lengths, keep their values."""
    return dry.like(tensor) if (tensor.is_floating_point() or tensor.is_meta) and not is_fake(tensor) else tensor


def find_path(
    traced: TracedModel, arguments: ForwardArguments, stages: Sequence[Stage], known: Mapping[Place, int]
) -> Path:
    """Traces the path of a forward. If this process has the whole model, also compares it with the unsplit model.

    Args:
        traced: The model.
        arguments: The arguments of the forward.
        stages: The stages of the pipe.
        known: For each layer of the cache, the layer of the pipe that fills it on other paths. On this path, no other
            layer of the pipe may fill it.

    Raises:
        CannotSplitError: If the forward cannot run in the layers of the pipe.
    """
    model = traced.model
    if lacks_values(model):  # With several processes, each has only some of the weights.
        return dry_forward(traced, arguments, known).path
    with unchanged(model), torch.no_grad(), replaced_tensors(model, on_cpu):
        arguments = _copy_arguments(arguments, on_cpu)
        path = _trace(traced, arguments, known, None).path
        _compare_with_model(traced, arguments, path, stages)
        return path


class TracedForward(NamedTuple):
    """A traced forward: its path, its output and the cache after it."""

    path: Path
    output: Any
    cache: Any


def dry_forward(traced: TracedModel, arguments: ForwardArguments, known: Mapping[Place, int]) -> TracedForward:
    """Traces a forward without values, and returns the shapes of its output and cache."""
    model, dry = traced.model, DryRun()
    arguments = _copy_arguments(arguments, partial(_without_values, dry))
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Linear) and not module.weight.is_floating_point():  # Packed by bitsandbytes.
                own_forward = {name: value for name, value in vars(module).items() if name == "forward"}
                stack.callback(vars(module).update, own_forward)
                stack.callback(vars(module).pop, "forward")
                vars(module)["forward"] = lambda value, n=module.out_features: value.new_empty((*value.shape[:-1], n))
        with replaced_tensors(model, _on_meta), unchanged(model), torch.no_grad(), dry.fake_tensors(model):
            return _trace(traced, arguments, known, dry)


def _on_meta(tensor: Tensor) -> Tensor:
    """Moves a parameter to the meta device, even if this process holds it, so that all parameters behave the same."""
    if not isinstance(tensor, nn.Parameter):
        return tensor
    layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return as_kind_of(tensor, layout)


def _copy_arguments(
    arguments: ForwardArguments, change: Callable[[Tensor], Tensor] = Tensor.clone
) -> ForwardArguments:
    """Copies arguments, including a cache, with `change` applied to all tensors."""
    leaves, structure = take_apart(tuple(arguments))
    for index, leaf in enumerate(leaves):
        if is_cache(leaf):
            leaves[index] = copy_of_cache(leaf, change)
        elif isinstance(leaf, Tensor):
            leaves[index] = change(leaf)
    return ForwardArguments(*structure.filled(leaves))


def _trace(
    traced: TracedModel, arguments: ForwardArguments, known: Mapping[Place, int], dry: DryRun | None
) -> TracedForward:
    """Traces a forward, with values or in a dry run."""
    model = type(traced.model).__name__
    arguments = _copy_arguments(arguments)
    cache = cache_in(arguments)
    tracer = _CacheTracer(ShallowCopy(traced.parts), dry, cache)
    before = _tensor_attributes(traced.model)
    output, trace = tracer.trace(*arguments)
    if kept := [name for name, value in _tensor_attributes(traced.model).items() if before.get(name) != value]:
        raise CannotSplitError(STATE_IN_MODULES.format(model=model, places=", ".join(kept[:3])))
    trace = replace(trace, starts=_starts(trace, traced.parts, list(traced.layers.items())))
    fills = dict(known)
    for place, ops in tracer.filled.items():
        for op in ops:
            if fills.setdefault(place, trace.layer_of(op)) != trace.layer_of(op):
                first = list(traced.layers)[fills[place]]
                raise CannotSplitError(SHARED_CACHE_LAYER.format(model=model, first=first, second=trace.ops[op].name))
    returned = frozenset(index for index, leaf in enumerate(take_apart(output)[0]) if is_cache(leaf))
    if returned and cache is None:
        raise CannotSplitError(CACHE_IN_FORWARD.format(model=model))
    return TracedForward(Path(trace, fills, returned), output, cache)


def _tensor_attributes(model: nn.Module) -> dict[str, int]:
    """Returns the ids of tensors in plain attributes of modules, by name."""
    return {
        f"{path}.{name}".lstrip("."): id(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _starts(trace: Trace, parts: Parts, layers: Sequence[tuple[str, ModelPart]]) -> tuple[int, ...]:
    """Returns the index of the first operation of each layer of the pipe. A path can skip layers."""
    starts, layer = [0], 0
    for index, op in enumerate(trace.ops):
        needed, previous = {op.name, *op.inner} if op.is_unit else set(), layer
        while not (needed <= {*layers[layer][1].units} and {*op.raw} <= layers[layer][1].raw.keys()):
            if layer == len(layers) - 1:
                model = type(parts.model).__name__
                raise CannotSplitError(OTHER_ORDER.format(model=model, name=op.name, layer=layers[previous][0]))
            layer += 1
        starts += [index] * (layer + 1 - len(starts))
        if op.is_unit and op.name in parts.blocks and layer < len(layers) - 1:
            layer += 1
    return (*starts, *[len(trace.ops)] * (len(layers) - len(starts)))


def _compare_with_model(
    traced: TracedModel, arguments: ForwardArguments, path: Path, stages: Sequence[Stage]
) -> None:
    """Raises a CannotSplitError if the output or cache of the stages differs bitwise from the unsplit model."""
    model = traced.model
    for_model, for_stages = _copy_arguments(arguments), _copy_arguments(arguments)
    expected = model(*for_model.args, **for_model.kwargs)
    forward, shallow_copy = StagedForward.begin(path, for_stages), ShallowCopy(traced.parts)
    for stage in stages:
        shallow_copy.refresh()
        layers = [Layer(layer.index, str(layer), model) for layer in stage.layers]
        make = partial(_interpreter, shallow_copy, layers)
        forward.run([layer.index for layer in layers], torch.device("cpu"), make, records_layouts=False)
    compare(model, *(_without_caches(path, output) for output in (expected, forward.output)))
    pair = [layers_in(cache) if (cache := cache_in(a)) is not None else {} for a in (for_stages, for_model)]
    for place in sorted({*pair[0], *pair[1]}):
        if differ(*(digest([tensors_in(list(vars(layers[place]).values()))]) for layers in pair)):
            raise CannotSplitError(OTHER_CACHE.format(model=type(model).__name__, index=place[1]))


def _interpreter(
    shallow_copy: ShallowCopy, layers: Sequence[Layer], trace: Trace, values: Any, log: Any, wanted: Any
) -> StageInterpreter:
    cpu = torch.device("cpu")
    return StageInterpreter(shallow_copy, trace, layers, values, log, wanted, cpu, KEY, LayerProgress())


def _without_caches(path: Path, output: Any) -> Any:
    leaves, structure = take_apart(output)
    return structure.filled([None if index in path.caches else leaf for index, leaf in enumerate(leaves)])
