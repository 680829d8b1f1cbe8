"""A stage of a traced model: one interpretation of the forward does all of its layers.

To measure what each layer costs, they run one by one, and hand on everything that lives. As a reference, hooks have
the model itself draw random numbers as a pipe of it does.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn

from gpipe._torch.modules import is_called_by_forward
from gpipe.stages.rng import rng_scope
from gpipe.stages.skips import Stashed
from gpipe.stages.stage import Layer, LayerProgress, RngKey, Stage, StageCall
from gpipe.stages.tree import Tree, tensors_in
from gpipe.tracing.interpreter import SAMPLE_KEY, Described, StageInterpreter, describe
from gpipe.tracing.parts import ModelPart, Parts
from gpipe.tracing.shallow_copy import ShallowCopy
from gpipe.tracing.slices import cache_of, tokens_before
from gpipe.tracing.trace import Leaves, Trace, ValueId, is_carried


def state_of(number: int, leaves: Leaves) -> dict[str, Tree]:
    """What the main line brings to the first stage: inputs, a log of what they are, and the trace's number."""
    carried = [is_carried(leaf) or tokens_before(leaf) is not None for leaf in leaves]
    live = [leaf for leaf in leaves if is_carried(leaf)]
    # of a slice also the place of its cache among the inputs, and the tokens before it
    sliced = [[at, tokens] for at, leaf in enumerate(leaves) if (tokens := tokens_before(leaf)) is not None]
    return {
        "path": number,
        "inputs": [None if one else leaf for one, leaf in zip(carried, leaves, strict=True)],
        "log": json.dumps([describe(leaves)]),  # between stages also of what operations returned
        "live": live,
        **({"slice": sliced[0]} if sliced else {}),
    }


class Crossings(NamedTuple):
    """What crosses into a stage and out of it, on one trace: by the main line in order, by skip routes by name."""

    enters: list[ValueId]
    arrives: dict[str, ValueId]  # by the names of routes
    leaves: list[ValueId]
    departs: dict[str, ValueId]  # by the names of stashes

    @classmethod
    def of(cls, trace: Trace, stage: int, stage_of: Sequence[int]) -> "Crossings":
        """Looks them up: between neighbours the main line brings all, and what is over has a route of its own.

        Of a layer that is a stage by itself, which no `stage_of` is given for, the main line brings all that lives.
        """
        if not stage_of:
            entering = list(trace.carried) if stage == 0 else trace.live_before(stage)
            return cls(entering, {}, trace.live_before(stage + 1), {})
        found = cls(list(trace.carried) if stage == 0 else [], {}, [], {})
        for edge in trace.edges:
            source, target = stage_of[edge.source], stage_of[edge.target]
            if source < target == stage:
                if source + 1 == stage:
                    found.enters.append(edge.value_id)
                else:
                    found.arrives[edge.pop.route_name] = edge.value_id
            elif stage == source < target:
                if source + 1 == target:
                    found.leaves.append(edge.value_id)
                else:
                    found.departs[edge.pop.name] = edge.value_id
        return found


class TracedStage(Stage):
    """Consecutive layers of a model, interpreted at once; there may be more `traces` later on."""

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
        self._crossings: dict[int, Crossings] = {}  # by the numbers of traces
        super().__init__(index, layers, device)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves what can be made again behind."""
        return {**vars(self), "_shallow_copy": None}

    def begin(self) -> None:
        super().begin()
        for layer in self.layers:
            if isinstance(layer.module, ModelPart):
                layer.module.follow()
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
        log, wanted = json.loads(value["log"]), frozenset((*crossings.leaves, *crossings.departs.values()))
        interpreter = self.interpreter(trace, values, log, wanted, call.rng_key, call.progress)
        inputs, beside = value["inputs"], {}
        if call.keys is not None:
            (at, tokens), beside = value["slice"], {"slice": value["slice"]}
            inputs = [*inputs[:at], cache_of(self._parts.model, tokens, call.keys), *inputs[at + 1 :]]
        output = interpreter.go(inputs)
        if interpreter.is_last:
            return output
        for name, value_id in crossings.departs.items():
            call.held[name] = Stashed(interpreter.made.get(value_id))
        live = list(map(interpreter.made.get, crossings.leaves))
        return {"path": number, "inputs": value["inputs"], "log": json.dumps(log), "live": live, **beside}

    def interpreter(
        self,
        trace: Trace,
        values: Mapping[ValueId, Any],
        log: list[Described],
        wanted: frozenset[ValueId],
        key: RngKey,
        progress: LayerProgress,
    ) -> StageInterpreter:
        """What does the operations of the stage on a trace, once, with the values that came across the cut before."""
        assert self._shallow_copy is not None
        return StageInterpreter(
            self._shallow_copy, trace, self.layers, values, log, wanted, self.device, key, progress
        )

    def find_nondeterministic_layer(self, value: Tree, call: StageCall, as_before: object) -> Layer | None:
        """None: one interpretation does all layers."""
        return None


class Essence(NamedTuple):
    """What decides how long something takes; layers of which it is alike take as long."""

    what: object
    own: int | None = None  # the number of a block, which it may know, as others know theirs
    shared: frozenset[int] = frozenset()  # identities of objects that all have


class SingleLayer(nn.Module):
    """One layer, which takes what the layers before handed on and hands on what the later ones need."""

    def __init__(self, at: int, part: ModelPart, parts: Parts, traces: Sequence[Trace]) -> None:
        super().__init__()
        self.part = part
        layer = Layer(at, part.stands_for, part)
        self.__dict__["stage"] = TracedStage(at, [layer], torch.device("cpu"), parts, traces, ())

    def essence(self, state: Tree) -> Essence:
        """What runs on a state, and its tensors: not what stands for other layers."""
        assert isinstance(state, dict)
        stage: TracedStage = self.__dict__["stage"]
        trace, model, at = stage._traces[state["path"]], self.part.__dict__["model"], stage.index
        done = (op for number, op in enumerate(trace.ops) if trace.layer_of(number) == at)
        names = ["" if op.is_unit else op.name for op in done]
        own = [int(word) for name in reversed(self.part.units) for word in name.split(".") if word.isdigit()]
        opened = (vars(model.get_submodule(name)).values() for name in stage._parts.opened)
        shared = frozenset(id(one) for some in opened for one in some if hasattr(one, "__dict__"))
        units = [model.get_submodule(name) for name in self.part.units]
        raw = [module._parameters[leaf] for _, ((module, leaf), *_) in self.part.raw.values()]
        crosses = state["inputs"], state["live"]
        return Essence((names, units, raw, crosses), own[0] if own else None, shared)

    def forward(self, state: Tree) -> Tree:
        stage: TracedStage = self.__dict__["stage"]
        stage.device = next((tensor.device for tensor in tensors_in(state)), stage.device)
        if stage._shallow_copy is None:
            stage.begin()
        return stage._run(state, StageCall({}, SAMPLE_KEY, LayerProgress()))


@contextmanager
def rng_scopes(parts: Parts, trace: Trace, key: RngKey) -> Iterator[None]:
    """Around one forward of the model itself, enters the rng_scope of each layer in turn.

    A layer ends where a block returns; the first also where the first block is called.
    """
    first_is_block = trace.ops[0].name in parts.blocks
    entered, is_over = 0, False

    def enter_next(*_: Any) -> None:
        nonlocal entered
        if is_over:  # an interrupt came before there was a handle to remove this hook by
            return
        scope.close()
        scope.enter_context(rng_scope(key.seed, key.step, entered, key.micro_batch))
        entered += 1

    def before(*_: Any) -> None:
        if entered == 1 and not first_is_block:
            enter_next()

    def between(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            before()
            made = forward(*args, **kwargs)
            enter_next()
            return made

        return run

    with ExitStack() as hooks, ExitStack() as scope:
        try:
            for block in map(parts.model.get_submodule, parts.blocks):
                # the model may call its forward itself
                if is_called_by_forward(block) and "forward" not in vars(block):
                    hooks.callback(vars(block).pop, "forward", None)
                    vars(block)["forward"] = between(block.forward)
                    continue
                hooks.callback(block.register_forward_pre_hook(before).remove)
                hooks.callback(block.register_forward_hook(enter_next).remove)
            enter_next()
            yield
        finally:
            is_over = True
