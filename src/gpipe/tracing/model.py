"""Traces a model on a sample, and verifies that its layers compute bitwise the same results as the model."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gpipe.stages.reachable_state import ReachableState
from gpipe.stages.skips import Pop
from gpipe.stages.stage import RngKey
from gpipe.stages.tree import Tree, replace_tensors
from gpipe.tracing import runs
from gpipe.tracing.meta_model import give_values, lacks_values, on_cpu, replaced_tensors
from gpipe.tracing.own_loss import COUNT, OwnLoss, check_average, loss_in, takes_count
from gpipe.tracing.parts import (
    Parts,
    check_blocks,
    closed,
    declared_blocks,
    find_blocks,
    layers_by_name,
    names_in,
    units_by_layer,
)
from gpipe.tracing.proof import Proof, compare, prove
from gpipe.tracing.shallow_copy import COLLECTOR
from gpipe.tracing.slices import check_takes_cache, cut, prove_slices
from gpipe.tracing.stage import SingleLayer, rng_scopes, state_of
from gpipe.tracing.trace import CannotSplitError, Leaves, Structure, Trace, take_apart
from gpipe.tracing.tracer import TracerRun, trace_forward

TraceKey: TypeAlias = tuple[str, tuple[object, ...], tuple[object, ...]]
"""The properties that select a trace: the structure and leaves of the inputs, and the settings of the model."""

OTHER_LAYER = (
    "With these inputs, {model} uses {name} in layer {layer} ({layer_name}), but with the sample it does not. Pass "
    "a sample that uses the whole model, or choose other blocks: gpipe.layers_of(model, sample, blocks=[...]). "
    "[module-in-different-layer]"
)
OTHER_NUMBER_OF_LAYERS = (
    "With these inputs, {model} has {layers} layers, but it has {expected} with the sample. The forward runs {more} "
    "operations: {ops}. Move these operations into a block, or create another pipe for this mode. "
    "[number-of-layers-differs]"
)
OTHER_KIND = (
    "Micro-batch {index} differs from micro-batch 0 in keys, types or settings: {inputs} instead of {expected}. Pass "
    "the same keys, booleans and strings, and tensors with the same number of dimensions. [micro-batches-differ]"
)
NOT_TRACED = (
    "The model was not traced with these input keys, types or settings, and with several processes it cannot be "
    "traced later. Create the pipe with a sample and settings like these. [inputs-not-traced]"
)

MOST_TRACES = 32
TOO_MANY_TRACES = (
    "{model} was traced {most} times, because strings, settings, keys or dimensions of its inputs changed: last from "
    "{last} to {now}. Pass values that change in every step as numbers or tensors. [too-many-traces]"
)

FirstTrace: TypeAlias = tuple[TracerRun, Proof, bool]
"""The traced run on the sample, the result of its verification, and whether the forward uses `num_items_in_batch`."""


class TracedBatch(NamedTuple):
    """The micro-batches of a mini-batch and the trace that stages interpret for them.

    Attributes:
        trace: The index of the trace in `TracedModel.traces`.
        states: The input of the first stage for each micro-batch.
        shares: The weight of each micro-batch in the model's own loss, if it was requested.
        findings: The findings to report.
        values: The micro-batches, as the inputs that the model itself receives.
    """

    trace: int
    states: list[Tree]
    shares: Sequence[float] = ()
    findings: Sequence[str] = ()
    values: Sequence[Tree] = ()


class TracedModel:
    """A model that runs in layers, with bitwise the same results as the model itself.

    Attributes:
        model: The model.
        lacks_values: Whether the model is on the meta device.
        parameter_names: The names of all parameters in the order of the model, including parameters that other
            processes hold.
        traces: The known control-flow paths. The path of the sample is the first.
        sample_names: The keys of the sample if it is a mapping, otherwise the name of its type.
        parts: The blocks of the model, and the modules that contain them.
        seconds: The time of each layer's forward on the sample, in seconds.
        layers: The layers by name.
    """

    def __init__(self, model: nn.Module, sample: Tree, blocks: Sequence[str] | None = None) -> None:
        """Traces the model on the sample.

        Args:
            model: The model.
            sample: The inputs of the model.
            blocks: The names of the blocks. Each layer ends after a block. Default: the blocks that the model
                declares in `_no_split_modules`, or the members of its lists of modules.
        """
        chosen = declared_blocks(model) if blocks is None else check_blocks(model, blocks)
        self.model = model
        self.lacks_values = lacks_values(model)
        self.parameter_names = [name for name, _ in model.named_parameters()]
        self.traces: list[Trace] = []
        self._averages: list[OwnLoss] = []
        self._numbers: dict[TraceKey, int] = {}
        self._verified: set[tuple[TraceKey, tuple[bool, ...]]] = set()  # The mode is part of the key.
        self._rejected: dict[tuple[TraceKey, tuple[bool, ...]], Exception] = {}
        self._can_trace = True
        self._state: ReachableState | None = None  # The model's state, as long as only runs that restore it follow.
        self.sample_names = sorted(map(str, sample)) if isinstance(sample, Mapping) else [type(sample).__name__]
        self.parts = Parts(model, chosen)
        run, proof, self._counts = self._trace_first(sample) if chosen else self._choose_blocks(model, sample)
        self.seconds = proof.seconds
        sample = self._with_count(sample, 1) if self._counts else sample
        self.parts = run.parts
        key = self.keys([take_apart(tuple(runs.arguments(model, sample)))])[0]
        self._keep(key, run, sample)
        with torch.enable_grad():
            self._verified.add((key, self._mode()))
        self.layers = layers_by_name(self.parts, run.trace)
        last = None if proof.last is None else proof.last.outputs
        # With a count of 1, a large sum over labels would hide other terms of the loss.
        if self._counts:
            sample = self._with_count(sample, max(self._averages[0].count(sample), 1))
        self._averages[0] = check_average(
            self._averages[0], model, sample, counts=self._counts, last=last, state=self._state
        )
        self._state = None

    def _choose_blocks(self, model: nn.Module, sample: Tree) -> FirstTrace:
        """Traces the model with the first choice of blocks that can be split.

        Starts with the innermost modules as blocks. If a module cannot be split between its blocks, it becomes a
        block itself.
        """
        traced: list[FirstTrace] = []
        rejected: list[CannotSplitError] = []
        blocks, before = find_blocks(model), [""]
        while blocks != before:
            self.parts = Parts(model, blocks)
            try:
                traced.append(self._trace_first(sample))
                places = traced[-1][0].doubtful
            except CannotSplitError as error:
                rejected.append(error)
                places = self.parts.places_of(error)
            else:
                if not places:
                    return traced[-1]
            blocks, before = closed(model, blocks, places), blocks
        if traced:
            return traced[0]
        if "blocks=[" not in str(rejected[0]):
            names = ", ".join(find_blocks(model)[:3])
            text, _, slug = str(rejected[0]).rpartition(" [")
            other_blocks = f"Or choose other blocks than {names}, ...: gpipe.layers_of(model, sample, blocks=[...])."
            rejected[0].args = (f"{text} {other_blocks} [{slug}",)
        raise rejected[0]

    def _trace_first(self, sample: Tree) -> FirstTrace:
        if self.lacks_values:  # Every layer may read buffers outside of units, so they need values.
            copied = self.parts.copied.items()
            give_values(self.model, [], [], 0, [f"{n}.{leaf}".lstrip(".") for n, m in copied for leaf in m._buffers])
            self._state = None
        plain = runs.arguments(self.model, sample)
        with runs.unchanged(self.model, self._state) as self._state:
            if self._accepts_count(sample):
                return self._trace_with_count(sample, plain)
            return self._trace_plain(plain)

    def _trace_plain(self, arguments: runs.ForwardArguments) -> FirstTrace:
        run = trace_forward(self.parts, arguments)
        return run, prove(run, arguments), False

    def _trace_with_count(self, sample: Tree, plain: runs.ForwardArguments) -> FirstTrace:
        """Traces a forward with `num_items_in_batch`. If the loss does not depend on it, the trace excludes it."""
        one, two = (runs.arguments(self.model, self._with_count(sample, count)) for count in (1, 2))
        run = trace_forward(self.parts, one)
        inputs = take_apart(tuple(plain))[1]
        leaf = inputs.spec.num_leaves  # The count is the last leaf.
        without = run._replace(trace=replace(run.trace, inputs=inputs, taken=run.trace.taken - {leaf}))
        if self.lacks_values:
            counts = leaf in run.trace.taken
            return (run, prove(run, one), True) if counts else (without, prove(without, plain), False)
        proof = prove(run, one)
        assert proof.last is not None
        loss, other = loss_in(proof.output), loss_in(proof.last.run(two))
        if loss is not None and other is not None and not torch.equal(loss, other):
            return run, proof, True
        last = proof.last._replace(trace=without.trace)
        try:
            compare(self.model, proof.output, last.run(plain))
        except CannotSplitError:  # Without the count, the forward takes a different path.
            return self._trace_plain(plain)
        return without, proof._replace(last=last), False

    def _accepts_count(self, value: Tree) -> bool:
        has_labels = isinstance(value, Mapping) and "labels" in value and COUNT not in value
        return has_labels and takes_count(self.model)

    @staticmethod
    def _with_count(value: Tree, count: float) -> Tree:
        assert isinstance(value, Mapping)
        return {**value, COUNT: torch.tensor(int(count))}

    def _keep(self, key: TraceKey, run: TracerRun, value: Tree) -> None:
        self._averages.append(OwnLoss.of(run.losses, value, counts=self._counts))
        self._numbers[key] = len(self.traces)
        self.traces.append(run.trace)

    def begin(
        self,
        values: Sequence[Tree],
        over_replicas: Callable[[float], float] | None = None,
        *,
        for_output: bool = False,
    ) -> TracedBatch:
        """Finds the trace of a mini-batch, or traces the model if its path is not known yet.

        Args:
            values: The micro-batches.
            over_replicas: Returns the sum of a divisor of the loss over data-parallel replicas. None if the model's
                own loss is not needed.
            for_output: Whether the output of the model is needed. The model then returns no cache for generation,
                unless the inputs request one.

        Raises:
            CannotSplitError: If the layers do not compute the same results on the new path.
            ValueError: If the micro-batches take different paths, or the path cannot be traced.
        """
        if for_output:
            values = [runs.without_cache(self.model, value) for value in values]
        ones = [1.0] * len(values)
        if self._counts and isinstance(values[0], Mapping) and COUNT in values[0]:  # The user passes the count.
            return self._find_trace(values)._replace(shares=ones)
        # A loss_fn receives the output that the model has without the count.
        needs_count = self._counts and (for_output or over_replicas is not None) and self._accepts_count(values[0])
        if needs_count:
            values = [self._with_count(value, 1) for value in values]
        batch = self._find_trace(values)
        average = self._averages[batch.trace]
        counts = [average.count(value) for value in values]
        batch = batch._replace(findings=average.find(values, counts))
        if over_replicas is None and (not for_output or (batch.findings and not needs_count)):
            return batch._replace(findings=[])
        total = (over_replicas or float)(sum(counts))
        shares = average.shares(counts, total)
        if not needs_count:
            return batch._replace(shares=shares)
        counted = self._find_trace([self._with_count(value, total) for value in values])
        return batch._replace(states=counted.states, shares=ones, values=counted.values)

    def begin_slices(
        self, values: Sequence[Tree], slices: int, over_replicas: Callable[[float], float] | None
    ) -> TracedBatch:
        """Splits the micro-batches into slices, and calls `begin` for all slices with the model's own loss."""
        return self.begin([part for value in values for part in cut(self.model, value, slices)], over_replicas)

    def prove_slices(self, value: Tree, slices: int) -> None:
        """Verifies on the sample that slices reproduce the results of the whole sequence."""
        check_takes_cache(self.model, slices, lacks_values=self.lacks_values)
        batch = self.begin_slices([value], slices, float)
        prove_slices(self.model, value, slices, self._averages[batch.trace])

    def first_state(self, value: Tree) -> Tree:
        """Returns the input of the first stage for a micro-batch with the model's own loss."""
        needs_count = self._counts and self._accepts_count(value)
        with torch.enable_grad():
            return self._find_trace([self._with_count(value, 1) if needs_count else value]).states[0]

    def _find_trace(self, values: Sequence[Tree]) -> TracedBatch:
        inputs = [take_apart(tuple(arguments)) for arguments in runs.arguments_of_each(self.model, values)]
        key, *others = self.keys(inputs)
        for index, other in enumerate(others, start=1):
            if other != key:
                expected, differing = _describe(values[0]), _describe(values[index])
                raise ValueError(OTHER_KIND.format(index=index, inputs=differing, expected=expected))
        path = key, self._mode()
        if path not in self._verified:
            if not self._can_trace:
                raise self._rejected.get(path) or ValueError(NOT_TRACED)
            try:
                self._trace(key, values[0])
            except Exception as error:
                self._rejected[path] = error
                raise
            self._verified.add(path)
        number = self._numbers[key]
        return TracedBatch(number, [state_of(number, leaves) for leaves, _ in inputs], values=values)

    def _mode(self) -> tuple[bool, ...]:
        """Returns settings on which a forward may depend, although the tracer does not see the code that reads them.

        The settings are whether gradients are enabled and, for `nn.TransformerEncoder`, which parameters require
        gradients.
        """
        opened = map(self.model.get_submodule, self.parts.opened)
        encoders = [part for part in opened if isinstance(part, nn.TransformerEncoder) and part.use_nested_tensor]
        may_nest = any(not encoder.training for encoder in encoders)
        return torch.is_grad_enabled(), *(p.requires_grad for p in (self.model.parameters() if may_nest else ()))

    def trace_all(self, value: Tree, slices: int = 1) -> None:
        """Traces the paths of training and evaluation, with and without gradients, labels and a loss.

        With several processes, no process keeps the whole model, so gpipe cannot trace further paths later.
        """
        values = [value]
        if isinstance(value, Mapping) and "labels" in value:
            values.append({key: item for key, item in value.items() if key != "labels"})
        uses: list[Callable[[Tree], object]] = [
            lambda value: self.begin([value], float),  # for the model's own loss
            lambda value: self.begin([value]),  # for a loss_fn
            lambda value: self.begin([value], for_output=True),
            *([] if slices == 1 else [lambda value: self.begin_slices([value], slices, float)]),
        ]
        initial: ReachableState | None = None
        for training in (True, False):
            with runs.unchanged(self.model, initial) as initial:
                if is_other_mode := self.model.training != training:
                    self.model.train(training)
                with runs.unchanged(self.model, None if is_other_mode else initial) as self._state:
                    for grad, inputs, begin in product((True, False), values, uses):
                        # _find_trace keeps the exception, and raises it if a step needs this trace.
                        with suppress(Exception), torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad):
                            begin(inputs)
        self._state = None
        if error := next(filter(runs.lacks_memory, self._rejected.values()), None):
            raise error
        self._can_trace = False

    def single_layers(self) -> list[nn.Module]:
        """Returns a module for each layer that runs only this layer."""
        return [SingleLayer(index, part, self.parts, self.traces) for index, part in enumerate(self.layers.values())]

    def rng_scope(self, seed: int, step: int, micro_batch: int) -> AbstractContextManager[None]:
        """Returns a context in which a forward of the model itself draws the same random numbers as a pipe."""
        return rng_scopes(self.parts, self.traces[0], RngKey(seed, step, micro_batch))

    def operations(self) -> list[list[tuple[str, int]]]:
        """Returns the name and the layer of each operation of each trace, for a comparison between processes."""
        return [[(op.name, trace.layer_of(at)) for at, op in enumerate(trace.ops)] for trace in self.traces]

    def names(self) -> dict[str, list[str]]:
        """Returns the names of the parameters and buffers of each layer, without the buffers between units."""
        return {name: names_in(self.model, part) for name, part in self.layers.items()}

    def buffers_between(self) -> list[Tensor]:
        """Returns the buffers that every layer may read, because code between units reads them."""
        return [self.model.get_buffer(name) for trace in self.traces for name in sorted(trace.buffers)]

    def materialize(self, indices: Collection[int], seed: int) -> None:
        """Initializes the layers with these indices that are on the meta device. Values depend on seed and index."""
        if self.lacks_values:
            give_values(self.model, [*self.names().values()], indices, seed)

    def release_remote_parameters(self) -> None:
        """Replaces the parameters of the model that other processes hold by the layers' placeholders."""
        for part in self.layers.values():
            part.push_parameters()

    def pops(self, number: int, stage_of: Sequence[int]) -> list[Pop]:
        """Returns the uses of tensors that skip at least one stage. Such a tensor has its own route."""
        return [edge.pop for edge in self.traces[number].edges if stage_of[edge.source] + 1 < stage_of[edge.target]]

    def keys(self, inputs: Sequence[tuple[Leaves, Structure]]) -> list[TraceKey]:
        """Returns the key of the trace for each of these inputs."""
        attributes = [vars(self.model.get_submodule(name)) for name in sorted(self.parts.opened)]
        attributes += [vars(held["config"]) for held in attributes if hasattr(held.get("config"), "__dict__")]
        settings = tuple(
            setting for held in attributes for setting in runs.settings_of(held) if setting[0] != COLLECTOR
        )
        return [(str(structure.spec), tuple(map(runs.kind_of, leaves)), settings) for leaves, structure in inputs]

    def _trace(self, key: TraceKey, value: Tree) -> None:
        """Traces a forward if its path is not known yet, and verifies it in the current gradient mode."""
        known, grad = self._numbers.get(key), torch.is_grad_enabled()
        if known is None and len(self.traces) >= MOST_TRACES:
            earlier = next(reversed(self._numbers))
            pairs = zip((earlier[0], *earlier[1], *earlier[2]), (key[0], *key[1], *key[2]), strict=False)
            last, now = next(pair for pair in pairs if pair[0] != pair[1])
            model = type(self.model).__name__
            raise ValueError(TOO_MANY_TRACES.format(model=model, most=MOST_TRACES, last=last, now=now))
        value = replace_tensors(value, on_cpu)
        try:
            # The model's layers may be on several devices.
            with runs.unchanged(self.model, self._state), replaced_tensors(self.model, on_cpu):
                arguments = runs.arguments(self.model, value)
                if known is None or lacks_values(self.model):
                    run = trace_forward(self.parts, arguments)
                else:
                    run = TracerRun(None, self.traces[known], self.parts, [], set())
                with torch.set_grad_enabled(grad):
                    prove(run, arguments)
            self._check_layers(run.trace)
        except CannotSplitError as error:
            mode = "In training" if self.model.training else "In evaluation"
            error.args = (f"{mode}, {'with gradients' if grad else 'under torch.no_grad()'}: {error}",)
            raise
        if known is None:
            self._keep(key, run, value)

    def _check_layers(self, trace: Trace) -> None:
        """Checks that a trace has the same layers as the first trace, and that no layer uses additional modules."""
        layers, model = list(self.layers.items()), type(self.model).__name__
        units, raw = units_by_layer(trace)
        if len(units) != len(layers):
            now, before = (Counter(op.name for op in path.ops) for path in (trace, self.traces[0]))
            ops = [*(now - before if len(units) > len(layers) else before - now)][:4]
            raise CannotSplitError(
                OTHER_NUMBER_OF_LAYERS.format(
                    model=model,
                    layers=len(units),
                    expected=len(layers),
                    more="more" if len(units) > len(layers) else "fewer",
                    ops=", ".join(ops) or "operations after the last block",
                )
            )
        for index, (layer_name, part) in enumerate(layers):
            new = [name for name in units[index] if name not in part.units]
            new += [name for name in raw[index] if name not in part.raw]
            if new:
                text = OTHER_LAYER.format(model=model, name=new[0], layer=index, layer_name=layer_name)
                raise CannotSplitError(text)


def _describe(value: Tree) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_describe(item)}" for key, item in value.items())
    return f"{value.dtype}, {value.dim()} dimensions" if isinstance(value, Tensor) else repr(value)
