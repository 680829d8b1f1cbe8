"""A model as layers: traced on a sample, and proven on it."""

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
from gpipe.tracing.own_loss import COUNT, OwnLoss, loss_in, takes_count, tried
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
"""What says which path a forward takes, as far as it can be known before."""

OTHER_LAYER = (
    "with these inputs, or in this mode, {what} in layer {layer} ({name}) of the {model}, and with the sample it did "
    "not; make the pipe with a sample that uses all of the model, or name other blocks: blocks=[...]"
)
DIFFERENT = (
    "micro-batch {at} has inputs of another kind ({other}) than micro-batch 0 ({one}); give all of them the same "
    "keys, tensors of the same kinds, and else the same values: a bool or a text may lead the forward elsewhere"
)
NOT_LEARNT = (
    "the model was not recorded with inputs of these keys and kinds, and its settings (config, attributes) of now, "
    "and over processes it cannot be any more: none has all of it; make the pipe with such a sample and such settings"
)

MOST_TRACES = 32
TOO_MANY = (
    "the {model} was recorded {most} times, for inputs that differ in more than their numbers: in texts, settings, "
    "keys or dimensions, each of which may lead its forward elsewhere ({one}, and then {other}). Leave what changes "
    "from step to step out of what the model is given and of its attributes, or give it as a number or a tensor"
)

First: TypeAlias = tuple[TracerRun, Proof, bool]
"""What a run on the sample has shown, its proof, and whether the loss is told its labels."""


class TracedBatch(NamedTuple):
    """Micro-batches that are to be interpreted."""

    trace: int  # the number of their path
    states: list[Tree]  # what the main line brings to the first stage, of each
    shares: Sequence[float] = ()  # of each in the model's own loss, where it was asked for
    findings: Sequence[str] = ()  # what is to be told
    values: Sequence[Tree] = ()  # the micro-batches as the model itself takes them


class TracedModel:
    """A model that is interpreted in layers, cut between blocks: those that are named, that it declares, or found."""

    def __init__(self, model: nn.Module, sample: Tree, blocks: Sequence[str] | None = None) -> None:
        given = declared_blocks(model) if blocks is None else check_blocks(model, blocks)
        self.model = model
        self.lacks_values = lacks_values(model)
        self.parameter_names = [name for name, _ in model.named_parameters()]  # in their order, of all processes
        self.traces: list[Trace] = []  # that the model is known to take, the sample's first
        self._averages: list[OwnLoss] = []
        self._numbers: dict[TraceKey, int] = {}
        self._proven: set[tuple[TraceKey, tuple[bool, ...]]] = set()  # with the mode, as for what is refused
        self._refused: dict[tuple[TraceKey, tuple[bool, ...]], Exception] = {}
        self._learns = True
        self._state: ReachableState | None = None  # The state of the model, while only runs that restore it follow.
        self.sample_names = sorted(map(str, sample)) if isinstance(sample, Mapping) else [type(sample).__name__]
        self.parts = Parts(model, given)
        found, proof, self._counts = self._trace_first(sample) if given else self._choose(model, sample)
        self.seconds = proof.seconds  # that the forward of each layer took on the sample
        sample = self._with_count(sample, 1) if self._counts else sample
        self.parts = found.parts
        key = self.keys([take_apart(tuple(runs.arguments(model, sample)))])[0]
        self._keep(key, found, sample)
        with torch.enable_grad():
            self._proven.add((key, self._mode()))
        self.layers = layers_by_name(self.parts, found.trace)
        last = None if proof.last is None else proof.last.outputs
        if self._counts:  # what a model adds to a mean over labels would not be seen beside a sum over them
            sample = self._with_count(sample, max(self._averages[0].count(sample), 1))
        self._averages[0] = tried(self._averages[0], model, sample, counts=self._counts, last=last, state=self._state)
        self._state = None

    def _choose(self, model: nn.Module, sample: Tree) -> First:
        """Traces the model cut at the first blocks that work; what does not, and has blocks inside, becomes one."""
        works: list[First] = []
        refused: list[CannotSplitError] = []
        blocks, before = find_blocks(model), [""]
        while blocks != before:
            self.parts = Parts(model, blocks)
            try:
                works.append(self._trace_first(sample))
                places = works[-1][0].doubtful
            except CannotSplitError as error:
                refused.append(error)
                places = self.parts.places_of(error)
            else:
                if not places:
                    return works[-1]
            blocks, before = closed(model, blocks, places), blocks
        if works:
            return works[0]
        if "blocks=[" not in str(refused[0]):
            names = ", ".join(find_blocks(model)[:3])
            text, _, slug = str(refused[0]).rpartition(" [")
            other_blocks = f"Or choose other blocks than {names}, ...: gpipe.layers_of(model, sample, blocks=[...])."
            refused[0].args = (f"{text} {other_blocks} [{slug}",)
        raise refused[0]

    def _trace_first(self, sample: Tree) -> First:
        if self.lacks_values:  # buffers outside of units, which every layer may read, get some
            copied = self.parts.copied.items()
            give_values(self.model, [], [], 0, [f"{n}.{leaf}".lstrip(".") for n, m in copied for leaf in m._buffers])
            self._state = None
        plain = runs.arguments(self.model, sample)
        with runs.unchanged(self.model, self._state) as self._state:
            if not self._may_count(sample):
                found = trace_forward(self.parts, plain)
                return found, prove(found, plain), False
            return self._trace_told(sample, plain)

    def _trace_told(self, sample: Tree, plain: runs.ForwardArguments) -> First:
        """Traces a forward that is told the number of labels; many only pass it on, and are not told it then."""
        one, two = (runs.arguments(self.model, self._with_count(sample, count)) for count in (1, 2))
        found = trace_forward(self.parts, one)
        inputs = take_apart(tuple(plain))[1]
        at = inputs.spec.num_leaves  # it is the last of the leaves
        untold = found._replace(trace=replace(found.trace, inputs=inputs, taken=found.trace.taken - {at}))
        if self.lacks_values:
            counts = at in found.trace.taken
            return (found, prove(found, one), True) if counts else (untold, prove(untold, plain), False)
        proof = prove(found, one)
        assert proof.last is not None
        loss, other = loss_in(proof.output), loss_in(proof.last.run(two))
        if loss is not None and other is not None and not torch.equal(loss, other):
            return found, proof, True
        last = proof.last._replace(trace=untold.trace)
        try:
            compare(self.model, proof.output, last.run(plain))
        except CannotSplitError:  # it goes another way
            found = trace_forward(self.parts, plain)
            return found, prove(found, plain), False
        return untold, proof._replace(last=last), False

    def _may_count(self, value: Tree) -> bool:
        given = isinstance(value, Mapping) and "labels" in value and COUNT not in value
        return given and takes_count(self.model)

    @staticmethod
    def _with_count(value: Tree, count: float) -> Tree:
        assert isinstance(value, Mapping)
        return {**value, COUNT: torch.tensor(int(count))}

    def _keep(self, key: TraceKey, found: TracerRun, value: Tree) -> None:
        self._averages.append(OwnLoss.of(found.losses, value, counts=self._counts))
        self._numbers[key] = len(self.traces)
        self.traces.append(found.trace)

    def begin(
        self,
        values: Sequence[Tree],
        over_replicas: Callable[[float], float] | None = None,
        *,
        for_output: bool = False,
    ) -> TracedBatch:
        """Has micro-batches take their path, which is traced if it is not known yet.

        If the model's loss is wanted, `over_replicas` adds what it averages over to that of other replicas. If the
        output is, a cache for generation is left out of it, unless asked for.
        """
        if for_output:
            values = [runs.without_cache(self.model, value) for value in values]
        ones = [1.0] * len(values)
        if self._counts and isinstance(values[0], Mapping) and COUNT in values[0]:  # the user has counted
            return self._begin(values)._replace(shares=ones)
        # a loss_fn is given what the model gives in a plain loop, which is told nothing
        is_told = self._counts and (for_output or over_replicas is not None) and self._may_count(values[0])
        if is_told:
            values = [self._with_count(value, 1) for value in values]
        begun = self._begin(values)
        average = self._averages[begun.trace]
        counts = [average.count(value) for value in values]
        begun = begun._replace(findings=average.find(values, counts))
        if over_replicas is None and (not for_output or (begun.findings and not is_told)):
            return begun._replace(findings=[])
        total = (over_replicas or float)(sum(counts))
        shares = average.shares(counts, total)
        if not is_told:
            return begun._replace(shares=shares)
        counted = self._begin([self._with_count(value, total) for value in values])
        return begun._replace(states=counted.states, shares=ones, values=counted.values)

    def begin_slices(
        self, values: Sequence[Tree], slices: int, over_replicas: Callable[[float], float] | None
    ) -> TracedBatch:
        """As `begin`, of the slices of all micro-batches, one behind another, where the loss is the model's own."""
        return self.begin([part for value in values for part in cut(self.model, value, slices)], over_replicas)

    def prove_slices(self, value: Tree, slices: int) -> None:
        """Refuses slices of a model to which they are another model than the whole, as the sample shows it."""
        check_takes_cache(self.model, slices, lacks_values=self.lacks_values)
        begun = self.begin_slices([value], slices, float)
        prove_slices(self.model, value, slices, self._averages[begun.trace])

    def first_state(self, value: Tree) -> Tree:
        """What the main line brings to the first stage, where the loss is the model's own."""
        is_told = self._counts and self._may_count(value)
        with torch.enable_grad():
            return self._begin([self._with_count(value, 1) if is_told else value]).states[0]

    def _begin(self, values: Sequence[Tree]) -> TracedBatch:
        apart = [take_apart(tuple(given)) for given in runs.arguments_of_each(self.model, values)]
        key, *others = self.keys(apart)
        for at, other in enumerate(others, start=1):
            if other != key:
                raise ValueError(DIFFERENT.format(at=at, one=_in_words(values[0]), other=_in_words(values[at])))
        path = key, self._mode()
        if path not in self._proven:
            if not self._learns:
                raise self._refused.get(path) or ValueError(NOT_LEARNT)
            try:
                self._learn(key, values[0])
            except Exception as error:
                self._refused[path] = error
                raise
            self._proven.add(path)
        number = self._numbers[key]
        return TracedBatch(number, [state_of(number, leaves) for leaves, _ in apart], values=values)

    def _mode(self) -> tuple[bool, ...]:
        """What a forward may go by where no operation shows it: gradients, and in torch's encoder who wants some."""
        opened = map(self.model.get_submodule, self.parts.opened)
        nest = [one for one in opened if isinstance(one, nn.TransformerEncoder) and one.use_nested_tensor]
        is_seen = any(not encoder.training for encoder in nest)
        return torch.is_grad_enabled(), *(p.requires_grad for p in self.model.parameters() if is_seen)

    def learn_all(self, value: Tree, slices: int = 1) -> None:
        """Traces all usual traces ahead, where no process will have the whole model: none can be traced later on."""
        values = [value]
        if isinstance(value, Mapping) and "labels" in value:
            values.append({key: item for key, item in value.items() if key != "labels"})
        wanted: list[Callable[[Tree], object]] = [
            lambda one: self.begin([one], float),  # for the model's own loss
            lambda one: self.begin([one]),  # for a loss_fn
            lambda one: self.begin([one], for_output=True),
            *([] if slices == 1 else [lambda one: self.begin_slices([one], slices, float)]),
        ]
        initial: ReachableState | None = None
        for training in (True, False):
            with runs.unchanged(self.model, initial) as initial:
                if is_other_mode := self.model.training != training:
                    self.model.train(training)
                with runs.unchanged(self.model, None if is_other_mode else initial) as self._state:
                    for grad, one, begin in product((True, False), values, wanted):
                        # _begin keeps an exception for the caller that asks for its trace.
                        with suppress(Exception), torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad):
                            begin(one)
        self._state = None
        if lacking := next(filter(runs.lacks_memory, self._refused.values()), None):
            raise lacking
        self._learns = False

    def alone(self) -> list[nn.Module]:
        """The layers as they run one by one, from one state to the next."""
        return [SingleLayer(at, part, self.parts, self.traces) for at, part in enumerate(self.layers.values())]

    def rng_scope(self, seed: int, step: int, micro_batch: int) -> AbstractContextManager[None]:
        """Around one forward of the model itself: it draws random numbers as a pipe with this seed does."""
        return rng_scopes(self.parts, self.traces[0], RngKey(seed, step, micro_batch))

    def outlines(self) -> list[list[tuple[str, int]]]:
        """The traces in short: their operations, each with its layer; the same in all processes."""
        return [[(op.name, trace.layer_of(at)) for at, op in enumerate(trace.ops)] for trace in self.traces]

    def names(self) -> dict[str, list[str]]:
        """The names of the parameters and buffers that each layer has; of buffers between units none has any."""
        return {name: names_in(self.model, part) for name, part in self.layers.items()}

    def buffers_between(self) -> list[Tensor]:
        """The buffers that are read between units, by every layer."""
        return [self.model.get_buffer(name) for trace in self.traces for name in sorted(trace.buffers)]

    def realize(self, own: Collection[int], seed: int) -> None:
        """Gives values to those of these layers that have none yet; they depend on (seed, index) alone."""
        if self.lacks_values:
            give_values(self.model, [*self.names().values()], own, seed)

    def let_go(self) -> None:
        """Has the model have what the layers have in place of parameters that other processes hold."""
        for part in self.layers.values():
            part.push_parameters()

    def pops(self, number: int, stage_of: Sequence[int]) -> list[Pop]:
        """The uses of tensors that have routes of their own."""
        return [edge.pop for edge in self.traces[number].edges if stage_of[edge.source] + 1 < stage_of[edge.target]]

    def keys(self, apart: Sequence[tuple[Leaves, Structure]]) -> list[TraceKey]:
        """What says which trace each of these arguments has."""
        held = [vars(self.model.get_submodule(name)) for name in sorted(self.parts.opened)]
        held += [vars(one["config"]) for one in held if hasattr(one.get("config"), "__dict__")]
        settings = tuple(setting for one in held for setting in runs.settings_of(one) if setting[0] != COLLECTOR)
        return [(str(structure.spec), tuple(map(runs.kind_of, leaves)), settings) for leaves, structure in apart]

    def _learn(self, key: TraceKey, value: Tree) -> None:
        """Traces a forward, if it is not known yet, and proves it with gradients recorded as they are now."""
        known, grad = self._numbers.get(key), torch.is_grad_enabled()
        if known is None and len(self.traces) >= MOST_TRACES:
            last = next(reversed(self._numbers))
            pairs = zip((last[0], *last[1], *last[2]), (key[0], *key[1], *key[2]), strict=False)
            one, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(TOO_MANY.format(model=type(self.model).__name__, most=MOST_TRACES, one=one, other=other))
        value = replace_tensors(value, on_cpu)
        try:
            # The model's layers may be on several devices.
            with runs.unchanged(self.model, self._state), replaced_tensors(self.model, on_cpu):
                given = runs.arguments(self.model, value)
                if known is None or lacks_values(self.model):
                    found = trace_forward(self.parts, given)
                else:
                    found = TracerRun(None, self.traces[known], self.parts, [], set())
                with torch.set_grad_enabled(grad):
                    prove(found, given)
            self._refuse_other_layers(found.trace)
        except CannotSplitError as error:
            mode = "in training" if self.model.training else "in evaluation"
            error.args = (f"{mode}, {'with gradients' if grad else 'under torch.no_grad()'}: {error}",)
            raise
        if known is None:
            self._keep(key, found, value)

    def _refuse_other_layers(self, trace: Trace) -> None:
        """Refuses another number of layers than the sample's, and what these do not have."""
        layers = list(self.layers.items())
        units, raw = units_by_layer(trace)
        if len(units) != len(layers):
            done, before = (Counter(op.name for op in one.ops) for one in (trace, self.traces[0]))
            where, more = ("here", done - before) if len(units) > len(layers) else ("there", before - done)
            raise CannotSplitError(
                f"with these inputs, or in this mode, the {type(self.model).__name__} has {len(units)} layers, and "
                f"{len(layers)} with the sample: {where} it also does {', '.join([*more][:4]) or 'something later'}. "
                f"A layer ends behind each block; put what is done at times alone into one, or make a pipe of its own"
            )
        for at, (name, part) in enumerate(layers):
            new = [f"{one} runs" for one in units[at] if one not in part.units]
            new += [f"{one} is used" for one in raw[at] if one not in part.raw]
            if new:
                raise CannotSplitError(
                    OTHER_LAYER.format(what=new[0], layer=at, name=name, model=type(self.model).__name__)
                )


def _in_words(value: Tree) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_in_words(item)}" for key, item in value.items())
    return f"{value.dtype}, {value.dim()} dimensions" if isinstance(value, Tensor) else repr(value)
