"""Proves that in layers a model gives what it gives by itself, to the last bit."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe._torch.dispatcher import ASKS_HOW_A_MASK_LIES, is_fake
from gpipe._torch.trees import keystr, map_tensors, tree_flatten_with_path
from gpipe.batch.microbatch import count_rows
from gpipe.stages.buffers import untouched
from gpipe.stages.digest import differ, digest
from gpipe.stages.memory_layout import copy_of
from gpipe.stages.rng import rng_scope
from gpipe.stages.stage import Layer
from gpipe.stages.tree import Tree, replace_tensors
from gpipe.tracing.interpreter import SAMPLE_KEY, StageInterpreter, describe
from gpipe.tracing.meta_model import Dry, lacks_values
from gpipe.tracing.runs import ForwardArguments, arguments, failing_apart, is_of_code, watched
from gpipe.tracing.shallow_copy import ShallowCopy
from gpipe.tracing.stage import rng_scopes
from gpipe.tracing.trace import CannotSplitError, OpCall, Structure, Trace, ValueId, is_carried, take_apart
from gpipe.tracing.tracer import TracerRun

OTHER_STRUCTURE = (
    "interpreted in layers, the {model} gives an output of other parts than by itself: {parts}. Caches (use_cache), "
    "and what blocks put elsewhere than into lists that the forward opens in a context variable, as transformers "
    "does, are not seen in layers; turn them off, in model.config or in what the model is given, or collect so"
)
OTHER_BITS = (
    "interpreted in layers, the {model} gives other values than by itself: {what}. Something between blocks depends "
    "on what is not seen there (a cache, a value that one block leaves for another, a random number): let it be part "
    "of what blocks are given and return, or name other blocks: blocks=[...]. Or a block keeps a tensor from call to "
    "call as an attribute, of which nothing is known: let it be a buffer, self.register_buffer(name, tensor). Or an "
    "nn.TransformerEncoder is evaluated with a padding mask, which it does in nested tensors, as layers cannot: make "
    "it with enable_nested_tensor=False, or set its use_nested_tensor to False"
)
NESTED = (
    "an nn.TransformerEncoder of the {model} is evaluated with a padding mask, and computes in nested tensors, as "
    "layers cannot, wherever no word stands behind padding. So the values of each mask say which path it takes: make "
    "the encoder with enable_nested_tensor=False, or set its use_nested_tensor to False"
)


class LastLayer(NamedTuple):
    """The last layer of a model, and what came to it of a sample: it runs again on other inputs, blocks do not."""

    shallow_copy: ShallowCopy
    trace: Trace
    values: Mapping[ValueId, Tensor | None]
    log: Sequence[list[list[Any]]]

    def run(self, given: ForwardArguments) -> Any:
        """What the model gives of these arguments, and of what came of the sample's."""
        leaves, _ = take_apart(replace_tensors(tuple(given), copy_of))
        values = map_tensors({**self.values}, copy_of)
        inputs = [None if ValueId(-1, at) in self.trace.carried else leaf for at, leaf in enumerate(leaves)]
        log = [describe(leaves), *self.log[1:]]
        index, parts, device = len(self.trace.starts) - 1, self.shallow_copy.parts, _device_of(leaves)
        layers, ops = [Layer(index, str(index), parts.model)], self.trace.ops[self.trace.starts[-1] :]
        units = nn.ModuleList(parts.units[name] for op in ops if op.is_unit for name in (op.name, *op.inner))
        self.shallow_copy.refresh()
        last = StageInterpreter(self.shallow_copy, self.trace, layers, values, log, frozenset(), device)
        with untouched(units):
            return last.go(inputs)

    def outputs(self, parts: Sequence[Tree]) -> Iterator[Any]:
        """What comes of the sample, which is the first part, and of its rows in the others, one behind another."""
        model, rows, first = self.shallow_copy.parts.model, count_rows(parts[0]), 0
        yield self.run(arguments(model, parts[0]))
        for part in parts[1:]:
            end = first + count_rows(part)
            yield self._of_rows(first, end, rows).run(arguments(model, part))
            first = end

    def _of_rows(self, first: int, end: int, rows: int) -> "LastLayer":
        if any(value is not None and value.shape[:1] != (rows,) for value in self.values.values()):
            raise ValueError("what comes to the last layer is not of rows alone")
        log = [[_cut(said, end - first, rows) for said in described] for described in self.log]
        values = map_tensors({**self.values}, lambda value: value[first:end])
        return self._replace(values=values, log=log)


def _cut(said: list[Any], part: int, rows: int) -> list[Any]:
    """What is written down of a tensor, of part of its rows; of anything else as it is."""
    match said:
        case [dtype, [first, *others], wants_gradient] if first == rows:
            return [dtype, [part, *others], wants_gradient]
        case _:
            return said


class Proof(NamedTuple):
    """What a proof shows beside: the output, the seconds of each layer, and the last one, if there are values."""

    output: Any
    seconds: list[float]
    last: LastLayer | None


def prove(found: TracerRun, given: ForwardArguments) -> Proof:
    """Proves what a run of a model's forward has shown, in the model's mode."""
    model = found.parts.model
    if lacks_values(model):  # there are layouts alone to be compared
        dry = Dry()
        with dry.faking(model):
            proof = _interpreted(found, given, dry)
            compare(model, *map(_detached, (found.output, proof.output)))  # it was traced with gradients
        return proof
    with rng_scopes(found.parts, found.trace, SAMPLE_KEY), watched(model) as expected:
        own = given.call(model)
    with watched(model) as buffers:
        proof = failing_apart(model, given, lambda: _interpreted(found, given, None))
    compare(model, own, proof.output)
    for name in {*expected, *buffers}:
        if _differ(expected.get(name), buffers.get(name)):
            text = OTHER_BITS.format(model=type(model).__name__, what=f"the buffer {name}")
            raise CannotSplitError(text, [name.rpartition(".")[0]])
    return proof


class _EchoingInterpreter(StageInterpreter):
    """Has each unit run once more behind its operation, on other inputs, and forgets what comes of it.

    So does a pipeline, whose micro-batches follow one another: what a block leaves somewhere for a later one is of
    another by the time it is read.
    """

    seconds_of_echoes = 0.0

    def do(self, call: OpCall) -> Any:
        made = super().do(call)
        may_nest = call.name == ASKS_HOW_A_MASK_LIES and not torch.is_grad_enabled()
        if may_nest and (self.dry is not None or not made):  # another mask may lead where nothing shows it
            raise CannotSplitError(NESTED.format(model=type(self.shallow_copy.parts.model).__name__))
        if call.unit is not None and self.dry is None:
            start = time.perf_counter()
            self._echo(call, call.unit)
            self.seconds_of_echoes += time.perf_counter() - start
        return made

    def _echo(self, call: OpCall, unit: nn.Module) -> None:
        real = any(map(is_carried, call.tensors))
        other = call.given(lambda tensor: _other(tensor) if is_carried(tensor) or not real else tensor)
        try:
            with rng_scope(0, 0, 0, 0), watched(unit):  # the layer goes on to draw as if there were none
                other.do()
        except Exception as error:
            if not is_of_code(error):  # else it cannot do with them, or not twice with one cache
                error.add_note(
                    f"while {call.name} ran once more on rows in another order, or on smaller numbers, as another "
                    f"micro-batch may have them, to see that it leaves nothing behind for other layers"
                )
                raise


def _other(tensor: Tensor) -> Tensor:
    """A tensor of the same kind that is another: rows in another order, or smaller numbers."""
    if isinstance(tensor, nn.Parameter) or not tensor.dim():
        return tensor
    other = tensor.detach().roll(1, 0 if len(tensor) > 1 else -1)
    if is_carried(tensor) and (len(tensor) == 1 or torch.equal(other, tensor)):
        other = tensor.detach() * 0.5
    return other.requires_grad_(tensor.requires_grad)


def _device_of(leaves: Sequence[Any]) -> torch.device:
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))


def _interpreted(found: TracerRun, given: ForwardArguments, dry: Dry | None) -> Proof:
    """What the model gives when each layer is interpreted by itself."""
    trace, parts = found.trace, found.parts
    leaves, _ = take_apart(replace_tensors(tuple(given), copy_of))
    values: dict[ValueId, Tensor | None] = {value_id: leaves[value_id.leaf] for value_id in trace.carried}
    inputs = [None if ValueId(-1, at) in values else leaf for at, leaf in enumerate(leaves)]
    log = [describe(leaves)]
    shallow_copy = ShallowCopy(parts)
    device = _device_of(leaves)
    seconds, output, last = [], None, None
    for index in range(len(trace.starts)):
        start = time.perf_counter()
        if index:
            live = {value_id: values[value_id] for value_id in trace.live_before(index)}
            values = map_tensors(live, copy_of)  # as a cut does
            shallow_copy.refresh()
        if index == len(trace.starts) - 1 and dry is None:
            last = LastLayer(shallow_copy, trace, map_tensors(values, _alone), list(log))
        wanted = frozenset(edge.value_id for edge in trace.edges if edge.source <= index < edge.target)
        layer = Layer(index, str(index), parts.model)
        used = {edge.value_id: values[edge.value_id] for edge in trace.edges if edge.target == index}
        arrived = used if index else values  # what else lives may go another way
        interpreter = _EchoingInterpreter(shallow_copy, trace, [layer], arrived, log, wanted, device, dry=dry)
        output = interpreter.go(inputs)
        values = {**{one: values.get(one) for one in wanted}, **interpreter.made}
        seconds.append(time.perf_counter() - start - interpreter.seconds_of_echoes)
    return Proof(output, seconds, last)


def _alone(value: Tensor) -> Tensor:
    """A value without the graph behind it, which later operations in place do not change."""
    return copy_of(value.detach()).requires_grad_(value.requires_grad)


def _detached(output: Any) -> Any:
    leaves, structure = take_apart(output)
    return structure.filled([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def compare(model: nn.Module, own: Any, found: Any) -> None:
    """Refuses an output of layers that is not the model's own."""
    (leaves, structure), (others, other) = take_apart(own), take_apart(found)
    name = type(model).__name__
    if structure != other:
        parts = f"{str(other.spec)[:200]} where it gives {str(structure.spec)[:200]}"
        raise CannotSplitError(OTHER_STRUCTURE.format(model=name, parts=parts))
    for at, pair in enumerate(zip(leaves, others, strict=True)):
        if _differ(*pair):
            what = f"output{_place_of(structure, at)} {_difference(*pair)}"
            raise CannotSplitError(OTHER_BITS.format(model=name, what=what))


def _differ(one: Any, other: Any) -> bool:
    if is_fake(one) or is_fake(other):
        return describe([one]) != describe([other])
    return bool(differ(digest([one]), digest([other])))


def _place_of(structure: Structure, at: int) -> str:
    """Where a leaf stands; its number, where plain dataclasses hold some."""
    places = tree_flatten_with_path(structure.filled(range(structure.spec.num_leaves)))[0]
    return keystr(places[at][0]) if len(places) == structure.spec.num_leaves else f", leaf {at},"


def _difference(one: Any, other: Any) -> str:
    """How one leaf of an output differs from what it should be, in words."""
    if not isinstance(one, Tensor) or describe([one]) != describe([other]):
        return f"is {other!s:.80} where it should be {one!s:.80}"
    try:
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        return f"differs: {' '.join(str(error).split())}"
    return "differs in the signs of zeros, or in what NaNs hold"
