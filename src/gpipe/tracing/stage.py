"""A stage of a traced model: one interpretation of the forward runs all of its layers.

For measurements, `SingleLayer` runs one layer, and returns all values that later layers need. For reference runs, the
hooks of `rng_scopes` make the unsplit model use the random numbers of a pipe.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
from torch import nn

from gpipe._torch.modules import is_called_by_forward
from gpipe.stages.rng import rng_scope
from gpipe.stages.skips import Stashed
from gpipe.stages.stage import Layer, LayerProgress, RngKey, Stage, StageCall
from gpipe.stages.tree import Tree, tensors_in
from gpipe.tracing.interpreter import SAMPLE_KEY, Descriptions, SkippedOps, StageInterpreter, describe
from gpipe.tracing.parts import ModelPart, Parts
from gpipe.tracing.shallow_copy import ShallowCopy
from gpipe.tracing.slices import cache_of, tokens_before
from gpipe.tracing.trace import Leaves, Trace, ValueId, is_carried


def state_of(number: int, leaves: Leaves) -> dict[str, Tree]:
    """Returns the input of the first stage: the number of the trace, the inputs, and their descriptions."""
    carried = [is_carried(leaf) or tokens_before(leaf) is not None for leaf in leaves]
    live = [leaf for leaf in leaves if is_carried(leaf)]
    # For a slice: the index of its cache among the inputs, and the number of tokens before it.
    sliced = [[index, tokens] for index, leaf in enumerate(leaves) if (tokens := tokens_before(leaf)) is not None]
    return {
        "path": number,
        "inputs": [None if hidden else leaf for hidden, leaf in zip(carried, leaves, strict=True)],
        "log": json.dumps(describe(leaves)),  # stages append a line for each operation
        "live": live,
        **({"slice": sliced[0]} if sliced else {}),
    }


MAX_LOGS = 256


@lru_cache(maxsize=MAX_LOGS)
def parse_log(log: str) -> Sequence[Descriptions]:
    """Returns the descriptions in each line of a log. Micro-batches of one size have the same logs."""
    return tuple(map(json.loads, log.splitlines()))


class Crossings(NamedTuple):
    """The tensors that cross into and out of a stage on one trace.

    Attributes:
        enters: The tensors from the preceding stage, in order.
        arrives: The tensors from earlier stages, by the name of their skip route.
        leaves: The tensors for the next stage, in order.
        departs: The tensors for later stages, by the name under which they are stashed.
    """

    enters: list[ValueId]
    arrives: dict[str, ValueId]
    leaves: list[ValueId]
    departs: dict[str, ValueId]

    @classmethod
    def of(cls, trace: Trace, stage: int, stage_of: Sequence[int]) -> "Crossings":
        """Finds the crossings of a stage. Adjacent stages pass tensors directly. Other stages use skip routes.

        An empty `stage_of` means that every layer is a stage, and sends all values that later layers need to the next
        stage.
        """
        if not stage_of:
            entering = list(trace.carried) if stage == 0 else trace.live_before(stage)
            return cls(entering, {}, trace.live_before(stage + 1), {})
        crossings = cls(list(trace.carried) if stage == 0 else [], {}, [], {})
        for edge in trace.edges:
            source, target = stage_of[edge.source], stage_of[edge.target]
            if source < target == stage:
                if source + 1 == stage:
                    crossings.enters.append(edge.value_id)
                else:
                    crossings.arrives[edge.pop.route_name] = edge.value_id
            elif stage == source < target:
                if source + 1 == target:
                    crossings.leaves.append(edge.value_id)
                else:
                    crossings.departs[edge.pop.name] = edge.value_id
        return crossings


class TracedStage(Stage):
    """Runs consecutive layers of a traced model in one interpretation.

    `traces` may grow later. `stage_of` holds the stage of each layer.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        device: torch.device,
        parts: Parts,
        traces: Sequence[Trace],
        stage_of: Sequence[int],
    ) -> None:
        self._parts, self._traces, self._stage_of = parts, traces, stage_of
        self._shallow_copy: ShallowCopy | None = None
        self._crossings: dict[int, Crossings] = {}  # by the number of the trace
        self._skipped: dict[object, SkippedOps] = {}  # by the number of the trace, the log and the device
        super().__init__(index, layers, device)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the shallow copy and placeholders, which are created again."""
        return {**vars(self), "_shallow_copy": None, "_skipped": {}}

    def begin(self) -> None:
        super().begin()
        for layer in self.layers:
            if isinstance(layer.module, ModelPart):
                layer.module.pull_parameters()
        self._shallow_copy = self._shallow_copy or ShallowCopy(self._parts, self.device)
        self.restart()

    def restart(self) -> None:
        assert self._shallow_copy is not None
        self._shallow_copy.refresh()

    def _run(self, value: Tree, call: StageCall) -> Tree:
        assert isinstance(value, dict)
        number = value["path"]
        trace = self._traces[number]
        if number not in self._crossings:
            self._crossings[number] = Crossings.of(trace, self.index, self._stage_of)
        crossings = self._crossings[number]
        values = dict(zip(crossings.enters, value["live"], strict=True))
        for route, value_id in crossings.arrives.items():
            values[value_id] = call.arrived[route]
        before, wanted = parse_log(value["log"]), frozenset((*crossings.leaves, *crossings.departs.values()))
        if len(self._skipped) > MAX_LOGS:
            self._skipped.clear()
        skipped = self._skipped.setdefault((number, value["log"], self.device), SkippedOps({}, {}))
        interpreter = self.interpreter(trace, values, [*before], wanted, call.rng_key, call.progress, skipped)
        inputs, slice_info = value["inputs"], {}
        if call.keys is not None:
            (index, tokens), slice_info = value["slice"], {"slice": value["slice"]}
            inputs = [*inputs[:index], cache_of(self._parts.model, tokens, call.keys), *inputs[index + 1 :]]
        output = interpreter.interpret(inputs)
        if interpreter.is_last:
            return output
        for name, value_id in crossings.departs.items():
            call.held[name] = Stashed(interpreter.produced.get(value_id))
        live = list(map(interpreter.produced.get, crossings.leaves))
        log = "\n".join([value["log"], *map(json.dumps, interpreter.log[len(before) :])])
        return {"path": number, "inputs": value["inputs"], "log": log, "live": live, **slice_info}

    def interpreter(
        self,
        trace: Trace,
        values: Mapping[ValueId, Any],
        log: list[Descriptions],
        wanted: frozenset[ValueId],
        key: RngKey,
        progress: LayerProgress,
        skipped: SkippedOps | None = None,
    ) -> StageInterpreter:
        """Returns an interpreter that runs the stage's layers once, from the values that the stage has received."""
        assert self._shallow_copy is not None
        return StageInterpreter(
            self._shallow_copy, trace, self.layers, values, log, wanted, self.device, key, progress, skipped=skipped
        )

    def find_nondeterministic_layer(self, value: Tree, call: StageCall, as_before: object) -> Layer | None:
        """Returns None, because one interpretation runs all layers, and gpipe cannot run a single layer again."""
        return None


class Essence(NamedTuple):
    """The properties of a layer that determine its run time. Layers with equal properties take equally long.

    Attributes:
        what: The modules, parameters, function names and tensors of the layer.
        own: The index of the block in its list, which the block may store. Blocks that are otherwise equal store
            different indices.
        shared: The identities of objects that all layers share.
    """

    what: object
    own: int | None = None
    shared: frozenset[int] = frozenset()


class SingleLayer(nn.Module):
    """Runs one layer as a module: from the live values before the layer to the live values after it."""

    def __init__(self, index: int, part: ModelPart, parts: Parts, traces: Sequence[Trace]) -> None:
        super().__init__()
        self.part = part
        layer = Layer(index, part.stands_for, part)
        self.__dict__["stage"] = TracedStage(index, [layer], torch.device("cpu"), parts, traces, ())

    def essence(self, state: Tree) -> Essence:
        """Returns the properties of the layer for an input `state`, without placeholders for other layers."""
        assert isinstance(state, dict)
        stage: TracedStage = self.__dict__["stage"]
        trace, model = stage._traces[state["path"]], self.part.__dict__["model"]
        ops = (op for index, op in enumerate(trace.ops) if trace.layer_of(index) == stage.index)
        names = ["" if op.is_unit else op.name for op in ops]
        indices = [int(key) for name in reversed(self.part.units) for key in name.split(".") if key.isdigit()]
        opened = (vars(model.get_submodule(name)).values() for name in stage._parts.opened)
        shared = frozenset(id(value) for values in opened for value in values if hasattr(value, "__dict__"))
        units = [model.get_submodule(name) for name in self.part.units]
        raw = [module._parameters[leaf] for _, ((module, leaf), *_) in self.part.raw.values()]
        crosses = state["inputs"], state["live"]
        return Essence((names, units, raw, crosses), indices[0] if indices else None, shared)

    def forward(self, state: Tree) -> Tree:
        stage: TracedStage = self.__dict__["stage"]
        stage.device = next((tensor.device for tensor in tensors_in(state)), stage.device)
        if stage._shallow_copy is None:
            stage.begin()
        return stage._run(state, StageCall({}, SAMPLE_KEY, LayerProgress()))


@contextmanager
def rng_scopes(parts: Parts, trace: Trace, key: RngKey) -> Iterator[None]:
    """Uses the random key of each layer in turn during one forward of the unsplit model.

    A layer ends when a block returns. The first layer also ends when the first block is called.
    """
    first_is_block = trace.ops[0].name in parts.blocks
    layer, scope = 0, rng_scope(key.seed, key.step, 0, key.micro_batch)

    def enter_next(*_: Any) -> None:
        nonlocal layer
        layer += 1
        scope.set_layer(layer)
        scope.grad = torch.is_grad_enabled()

    def before(*_: Any) -> None:
        if layer == 0 and not first_is_block:
            enter_next()

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            before()
            result = forward(*args, **kwargs)
            enter_next()
            return result

        return run

    with ExitStack() as hooks, scope:
        for block in map(parts.model.get_submodule, parts.blocks):
            # A hook would miss calls of `block.forward` by the model.
            if is_called_by_forward(block) and "forward" not in vars(block):
                hooks.callback(vars(block).pop, "forward", None)
                vars(block)["forward"] = wrapped(block.forward)
                continue
            hooks.callback(block.register_forward_pre_hook(before).remove)
            hooks.callback(block.register_forward_hook(enter_next).remove)
        yield
