"""A stage of a traced model: one interpretation of the forward does all of its layers.

To measure what each layer costs, they run one by one, and hand on everything that lives. As a reference, hooks have
the model itself draw random numbers as a pipe of it does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.stages.rng import rng_scope
from gpipe.stages.skips import Pop, Stashed
from gpipe.stages.stage import Layer, LayerProgress, RngKey, Stage
from gpipe.stages.tree import Tree, tensors_in
from gpipe.tracing.interpreter import StageInterpreter
from gpipe.tracing.parts import ModelPart
from gpipe.tracing.shallow_copy import Parts, ShallowCopy
from gpipe.tracing.trace import Trace
from gpipe.tracing.values import Leaves, ValueId, describe, is_carried


def state_of(number: int, leaves: Leaves) -> dict[str, Tree]:
    """What the main line brings to the first stage: inputs, a log of what they are, and the trace's number.

    Between stages it brings what later operations returned, too.
    """
    return {
        "path": number,
        "inputs": [None if is_carried(leaf) else leaf for leaf in leaves],
        "log": json.dumps([describe(leaves)]),
        "live": [leaf for leaf in leaves if is_carried(leaf)],
    }


def pops_between(trace: Trace, stage_of: Sequence[int]) -> list[Pop]:
    """The uses of tensors that have routes of their own: between neighbours the main line brings all."""
    return [edge.pop for edge in trace.edges if stage_of[edge.source] + 1 < stage_of[edge.target]]


@dataclass(frozen=True)
class Crossings:
    """What crosses into a stage and out of it, on one trace.

    Attributes:
        enters: What the main line brings, in order.
        arrives: What skip routes bring, by their names.
        leaves: What the main line takes on, in order.
        departs: What skip routes take on, by the names of stashes.
    """

    enters: tuple[ValueId, ...]
    arrives: Mapping[str, ValueId]
    leaves: tuple[ValueId, ...]
    departs: Mapping[str, ValueId]

    @classmethod
    def of(cls, trace: Trace, stage: int, stage_of: Sequence[int]) -> "Crossings":
        """Looks them up."""
        ends = [(edge, stage_of[edge.source], stage_of[edge.target]) for edge in trace.edges]
        return cls(
            trace.carried if stage == 0 else tuple(edge.value_id for edge, a, b in ends if a + 1 == b == stage),
            {edge.pop.route_name: edge.value_id for edge, a, b in ends if a + 1 < b == stage},
            tuple(edge.value_id for edge, a, b in ends if stage == a == b - 1),
            {edge.pop.name: edge.value_id for edge, a, b in ends if stage == a < b - 1},
        )

    @property
    def wanted(self) -> frozenset[ValueId]:
        """All that leaves."""
        return frozenset((*self.leaves, *self.departs.values()))


class TracedStage(Stage):
    """Consecutive layers of a model, interpreted at once.

    Args:
        index: Its number.
        layers: Its layers.
        device: Where they are.
        parts: The model.
        traces: Those that it is known to take; there may be more later on.
        stage_of: The stage of each of its layers.
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
        self._crossings: dict[int, Crossings] = {}
        super().__init__(index, layers, device)
        self.begin()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves what can be made again behind."""
        return {**vars(self), "_shallow_copy": None}

    def begin(self) -> None:
        """Begins a run: follows what was changed in the model."""
        super().begin()
        for layer in self.layers:
            if isinstance(layer.module, ModelPart):
                layer.module.follow()
        self._copy_of_model().refresh()

    def _copy_of_model(self) -> ShallowCopy:
        if self._shallow_copy is None:
            self._shallow_copy = self._parts.shallow_copy()
            self._shallow_copy.put_on(self.device)
        return self._shallow_copy

    def _crossings_on(self, trace: Trace) -> Crossings:
        return Crossings.of(trace, self.index, self._stage_of)

    def _run(
        self,
        value: Tree,
        arrived: Mapping[str, Tensor | None],
        held: dict[str, Stashed],
        rng_key: RngKey,
        progress: LayerProgress,
    ) -> Tree:
        assert isinstance(value, dict)
        number = value["path"]
        trace = self._traces[number]
        if number not in self._crossings:
            self._crossings[number] = self._crossings_on(trace)
        crossings = self._crossings[number]
        values = dict(zip(crossings.enters, value["live"], strict=True))
        values |= {value_id: arrived[route] for route, value_id in crossings.arrives.items()}
        log = json.loads(value["log"])
        interpreter = StageInterpreter(
            self._copy_of_model(), trace, self.layers, values, log, crossings.wanted, self.device, rng_key, progress
        )
        output = interpreter.go(value["inputs"])
        if interpreter.is_last:
            return output
        held |= {name: Stashed.of(interpreter.made.get(value_id)) for name, value_id in crossings.departs.items()}
        live = [interpreter.made.get(value_id) for value_id in crossings.leaves]
        return {"path": number, "inputs": value["inputs"], "log": json.dumps(log), "live": live}

    def find_unsteady(self, value: Tree, arrived: Mapping[str, Tensor | None], rng_key: RngKey) -> Layer | None:
        """None: one interpretation does all layers."""
        return None


class SingleLayer(nn.Module):
    """One layer, which takes what the layers before handed on and hands on what the later ones need."""

    def __init__(self, at: int, part: ModelPart, parts: Parts, traces: Sequence[Trace]) -> None:
        super().__init__()
        self.part = part
        self.__dict__["stage"] = _SingleStage(
            at, [Layer(at, part.stands_for, part)], torch.device("cpu"), parts, traces, ()
        )

    def forward(self, state: Tree) -> Tree:
        """Interprets the layer."""
        stage: _SingleStage = self.__dict__["stage"]
        stage.device = next((tensor.device for tensor in tensors_in(state)), stage.device)
        return stage._run(state, {}, {}, RngKey(0, 0, 0), LayerProgress())


class _SingleStage(TracedStage):
    def _crossings_on(self, trace: Trace) -> Crossings:
        entering = trace.carried if self.index == 0 else tuple(trace.live_before(self.index))
        return Crossings(entering, {}, tuple(trace.live_before(self.index + 1)), {})


@contextmanager
def rng_scopes(parts: Parts, trace: Trace, key: RngKey) -> Iterator[None]:
    """Around one forward of the model itself, enters the rng_scope of each layer in turn.

    A layer ends where a block returns; the first also where the first block is called.
    """
    first_is_block = trace.ops[0].name in parts.blocks
    entered = count()
    calls = count()

    def enter_next() -> None:
        scope.close()
        scope.enter_context(rng_scope(key.seed, key.step, next(entered), key.micro_batch))

    def before(module: nn.Module, args: Any) -> None:
        if not next(calls) and not first_is_block:
            enter_next()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        enter_next()

    with ExitStack() as hooks, ExitStack() as scope:
        for block in map(parts.model.get_submodule, parts.blocks):
            hooks.callback(block.register_forward_pre_hook(before).remove)
            hooks.callback(block.register_forward_hook(after).remove)
        enter_next()
        yield
