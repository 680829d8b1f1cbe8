"""Verifies on the sample that a split model computes bitwise the same results as the model itself."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe._torch.dispatcher import CHECKS_MASK_ALIGNMENT, is_fake
from gpipe._torch.trees import keystr, map_tensors, tree_flatten_with_path
from gpipe.batch.microbatch import count_rows
from gpipe.stages.digest import differ, digest
from gpipe.stages.memory_layout import copy_of
from gpipe.stages.rng import rng_scope
from gpipe.stages.stage import Layer
from gpipe.stages.tree import Tree, replace_tensors
from gpipe.tracing.interpreter import SAMPLE_KEY, StageInterpreter, describe
from gpipe.tracing.meta_model import DryRun, lacks_values
from gpipe.tracing.runs import ForwardArguments, arguments, is_of_code, run_split, watched
from gpipe.tracing.shallow_copy import ShallowCopy
from gpipe.tracing.stage import rng_scopes
from gpipe.tracing.trace import CannotSplitError, OpCall, Structure, Trace, ValueId, is_carried, take_apart
from gpipe.tracing.tracer import TracerRun

OTHER_STRUCTURE = (
    "The output of the split {model} has a different structure than the output of the model: {split} instead of "
    "{expected}. Turn off caches (use_cache=False), and return values that blocks store elsewhere. "
    "[split-output-structure-differs]"
)
OTHER_VALUES = (
    "The split {model} computes different values than the model: {difference}. Pass values to later blocks as "
    "arguments, register state with register_buffer(name, tensor), or choose different blocks: "
    "gpipe.layers_of(model, sample, blocks=[...]). [split-output-differs]"
)
OTHER_VALUES_OF_ENCODER = (
    "The split {model} computes different values than the model: {difference}. In evaluation, its "
    "nn.TransformerEncoder may use nested tensors, which cannot cross layers. Create the encoder with "
    "enable_nested_tensor=False, or set its use_nested_tensor to False. [nested-tensor-encoder]"
)


class LastLayer(NamedTuple):
    """The last layer of a model, with its inputs from the sample, so that the layer can run again on its own."""

    shallow_copy: ShallowCopy
    trace: Trace
    values: Mapping[ValueId, Tensor | None]
    log: Sequence[list[list[Any]]]

    def run(self, arguments: ForwardArguments) -> Any:
        """Returns the model's output. The last layer receives these arguments, and the values of earlier layers."""
        leaves, _ = take_apart(replace_tensors(tuple(arguments), copy_of))
        values = map_tensors({**self.values}, copy_of)
        inputs = [None if ValueId(-1, index) in self.trace.carried else leaf for index, leaf in enumerate(leaves)]
        log = [describe(leaves), *self.log[1:]]
        index, parts, device = len(self.trace.starts) - 1, self.shallow_copy.parts, _device_of(leaves)
        layers, ops = [Layer(index, str(index), parts.model)], self.trace.ops[self.trace.starts[-1] :]
        units = nn.ModuleList(parts.units[name] for op in ops if op.is_unit for name in (op.name, *op.inner))
        self.shallow_copy.refresh()
        last = StageInterpreter(self.shallow_copy, self.trace, layers, values, log, frozenset(), device)
        with watched(units):
            return last.interpret(inputs)

    def outputs(self, parts: Sequence[Tree]) -> Iterator[Any]:
        """Yields the output for the sample (the first element of `parts`), and then for parts of its rows."""
        model, rows, first = self.shallow_copy.parts.model, count_rows(parts[0]), 0
        yield self.run(arguments(model, parts[0]))
        for part in parts[1:]:
            end = first + count_rows(part)
            yield self._slice_rows(first, end, rows).run(arguments(model, part))
            first = end

    def _slice_rows(self, first: int, end: int, rows: int) -> "LastLayer":
        if any(value is not None and value.shape[:1] != (rows,) for value in self.values.values()):
            raise ValueError(f"An input of the last layer does not have {rows} rows.")
        log = [[_slice_description(leaf, end - first, rows) for leaf in descriptions] for descriptions in self.log]
        values = map_tensors({**self.values}, lambda value: value[first:end])
        return self._replace(values=values, log=log)


def _slice_description(description: list[Any], part: int, rows: int) -> list[Any]:
    """Replaces the number of rows in the description of a tensor by `part`. Returns other descriptions unchanged."""
    match description:
        case [dtype, [first, *others], requires_grad] if first == rows:
            return [dtype, [part, *others], requires_grad]
        case _:
            return description


class Proof(NamedTuple):
    """The results of a verified run in layers.

    Attributes:
        output: The output of the split model.
        seconds: The time of each layer's forward, in seconds.
        last: The last layer. None if the model has no values.
    """

    output: Any
    seconds: list[float]
    last: LastLayer | None


def prove(run: TracerRun, arguments: ForwardArguments) -> Proof:
    """Verifies a traced forward in the model's current mode.

    If the model is on the meta device, compares only layouts.

    Raises:
        CannotSplitError: If an output or a buffer of the split model differs.
    """
    model = run.parts.model
    if lacks_values(model):
        dry = DryRun()
        with dry.fake_tensors(model):
            proof = _run_layers(run, arguments, dry)
            compare(model, *map(_detached, (run.output, proof.output)))  # the tracer ran with gradients
        return proof
    with rng_scopes(run.parts, run.trace, SAMPLE_KEY), watched(model) as expected:
        output = arguments.call(model)
    with watched(model) as buffers:
        proof = run_split(model, arguments, lambda: _run_layers(run, arguments, None))
    compare(model, output, proof.output)
    for name in {*expected, *buffers}:
        if _differ(expected.get(name), buffers.get(name)):
            raise _other_values(model, f"the buffer {name} differs", [name.rpartition(".")[0]])
    return proof


class _EchoingInterpreter(StageInterpreter):
    """Runs each unit a second time after its operation, on different inputs, and discards the second result.

    In a pipeline, a unit also runs again, on the next micro-batch. If a block stores a tensor for a later block, the
    second run therefore overwrites the tensor, as the next micro-batch would.
    """

    seconds_of_echoes = 0.0

    def execute(self, call: OpCall) -> Any:
        result = super().execute(call)
        may_nest = call.name == CHECKS_MASK_ALIGNMENT and not torch.is_grad_enabled()
        if may_nest and (self.dry is not None or not result):  # a different mask may lead to nested tensors
            raise CannotSplitError(
                f"{type(self.shallow_copy.parts.model).__name__} evaluates an nn.TransformerEncoder with a padding "
                f"mask. For some masks, the encoder uses nested tensors, which cannot cross layers. Create the "
                f"encoder with enable_nested_tensor=False, or set its use_nested_tensor to False. "
                f"[nested-tensor-encoder]"
            )
        if call.unit is not None and self.dry is None:
            start = time.perf_counter()
            self._echo(call, call.unit)
            self.seconds_of_echoes += time.perf_counter() - start
        return result

    def _echo(self, call: OpCall, unit: nn.Module) -> None:
        has_floats = any(map(is_carried, call.tensors))
        echo = call.map_tensors(lambda tensor: _different(tensor) if is_carried(tensor) or not has_floats else tensor)
        try:
            with rng_scope(0, 0, 0, 0), watched(unit):  # do not use up random numbers of the layer
                echo.execute()
        except Exception as error:
            # Errors of code are expected: the unit may not accept such inputs, or not twice with one cache.
            if not is_of_code(error):
                error.add_note(
                    f"This happened while gpipe ran {call.name} again on the sample, with its rows reordered or "
                    f"scaled, to check that the module keeps no state. Pass a sample whose rows can be reordered and "
                    f"scaled. [second-run-failed]"
                )
                raise


def _different(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same layout with different values: rows in a different order, or smaller numbers."""
    if isinstance(tensor, nn.Parameter) or not tensor.dim():
        return tensor
    different = tensor.detach().roll(1, 0 if len(tensor) > 1 else -1)
    if is_carried(tensor) and (len(tensor) == 1 or torch.equal(different, tensor)):
        different = tensor.detach() * 0.5
    return different.requires_grad_(tensor.requires_grad)


def _device_of(leaves: Sequence[Any]) -> torch.device:
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))


def _run_layers(run: TracerRun, arguments: ForwardArguments, dry: DryRun | None) -> Proof:
    """Runs the model's forward in layers, one layer after another."""
    trace, parts = run.trace, run.parts
    leaves, _ = take_apart(replace_tensors(tuple(arguments), copy_of))
    values: dict[ValueId, Tensor | None] = {value_id: leaves[value_id.leaf] for value_id in trace.carried}
    inputs = [None if ValueId(-1, index) in values else leaf for index, leaf in enumerate(leaves)]
    log = [describe(leaves)]
    shallow_copy = ShallowCopy(parts)
    device = _device_of(leaves)
    seconds, output, last = [], None, None
    for index in range(len(trace.starts)):
        start = time.perf_counter()
        if index:
            live = {value_id: values[value_id] for value_id in trace.live_before(index)}
            values = map_tensors(live, copy_of)  # as a stage boundary does
            shallow_copy.refresh()
        if index == len(trace.starts) - 1 and dry is None:
            last = LastLayer(shallow_copy, trace, map_tensors(values, _as_leaf), list(log))
        wanted = frozenset(edge.value_id for edge in trace.edges if edge.source <= index < edge.target)
        layer = Layer(index, str(index), parts.model)
        used = {edge.value_id: values[edge.value_id] for edge in trace.edges if edge.target == index}
        received = used if index else values  # other live values may bypass the stage of this layer
        interpreter = _EchoingInterpreter(shallow_copy, trace, [layer], received, log, wanted, device, dry=dry)
        output = interpreter.interpret(inputs)
        values = {**{value_id: values.get(value_id) for value_id in wanted}, **interpreter.produced}
        seconds.append(time.perf_counter() - start - interpreter.seconds_of_echoes)
    return Proof(output, seconds, last)


def _as_leaf(value: Tensor) -> Tensor:
    """Returns a copy of a tensor without its autograd graph. Later in-place operations do not change the copy."""
    return copy_of(value.detach()).requires_grad_(value.requires_grad)


def _detached(output: Any) -> Any:
    leaves, structure = take_apart(output)
    return structure.filled([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def compare(model: nn.Module, expected: Any, output: Any) -> None:
    """Raises an error if the output of the split model differs from the model's own, bitwise or in structure."""
    (expected_leaves, expected_structure), (leaves, structure) = take_apart(expected), take_apart(output)
    if structure != expected_structure:
        split, own = str(structure.spec)[:200], str(expected_structure.spec)[:200]
        raise CannotSplitError(OTHER_STRUCTURE.format(model=type(model).__name__, split=split, expected=own))
    for index, pair in enumerate(zip(expected_leaves, leaves, strict=True)):
        if _differ(*pair):
            raise _other_values(model, f"output{_path_of(structure, index)} {_difference(*pair)}")


def _other_values(model: nn.Module, difference: str, places: Sequence[str] = ()) -> CannotSplitError:
    encoders = (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))
    may_nest = any(encoder.use_nested_tensor and not encoder.training for encoder in encoders)
    text = OTHER_VALUES_OF_ENCODER if may_nest else OTHER_VALUES
    return CannotSplitError(text.format(model=type(model).__name__, difference=difference), places)


def _differ(expected: Any, leaf: Any) -> bool:
    if is_fake(expected) or is_fake(leaf):
        return describe([expected]) != describe([leaf])
    return bool(differ(digest([expected]), digest([leaf])))


def _path_of(structure: Structure, index: int) -> str:
    """Returns the path of a leaf in a value, or its index if dataclasses hold some of the leaves."""
    paths = tree_flatten_with_path(structure.filled(range(structure.spec.num_leaves)))[0]
    return keystr(paths[index][0]) if len(paths) == structure.spec.num_leaves else f", leaf {index},"


def _difference(expected: Any, leaf: Any) -> str:
    if not isinstance(expected, Tensor) or describe([expected]) != describe([leaf]):
        return f"is {leaf!s:.80} instead of {expected!s:.80}"
    try:
        torch.testing.assert_close(leaf, expected, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        return f"differs: {' '.join(str(error).split()).removesuffix('.')}"
    return "differs in the signs of zeros or in NaN payloads"
