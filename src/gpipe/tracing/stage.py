"""A stage of a traced model: one interpretation of the forward does all of its layers.

To measure what each layer costs, they run one by one, and hand on everything that lives. As a reference, hooks have
the model itself draw random numbers as a pipe of it does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gpipe._torch.modules import hooks_of
from gpipe.stages.buffers import untouched
from gpipe.stages.recompute_check import Digest, differ, digest
from gpipe.stages.rng import rng_scope
from gpipe.stages.skips import Stashed
from gpipe.stages.stage import Layer, LayerProgress, RngKey, Stage, StageCall
from gpipe.stages.tree import Tree, copy_of, tensors_in
from gpipe.tracing.interpreter import CARRIED_AS_THEY_ARE, StageInterpreter, describe
from gpipe.tracing.parts import ModelPart, Parts
from gpipe.tracing.program import Modes, Part, Program, RecordingInterpreter
from gpipe.tracing.shallow_copy import ShallowCopy
from gpipe.tracing.trace import Leaves, Trace, ValueId, is_carried


def state_of(number: int, leaves: Leaves) -> dict[str, Tree]:
    """What the main line brings to the first stage: inputs, a log of what they are, and the trace's number.

    Between stages it brings what later operations returned, too.
    """
    carried = [is_carried(leaf) for leaf in leaves]
    return {
        "path": number,
        "inputs": [None if one else leaf for one, leaf in zip(carried, leaves, strict=True)],
        "log": json.dumps([describe(leaves)]),
        "live": [leaf for one, leaf in zip(carried, leaves, strict=True) if one],
    }


class Crossings(NamedTuple):
    """What crosses into a stage and out of it, on one trace: by the main line in order, by skip routes by name."""

    enters: list[ValueId]
    arrives: dict[str, ValueId]  # by the names of routes
    leaves: list[ValueId]
    departs: dict[str, ValueId]  # by the names of stashes

    @property
    def arriving(self) -> list[ValueId]:
        """What comes to the stage."""
        return [*self.enters, *self.arrives.values()]

    @property
    def wanted(self) -> frozenset[ValueId]:
        """What is needed of what is made here."""
        return frozenset((*self.leaves, *self.departs.values()))

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


class Trial(NamedTuple):
    """A program, and the micro-batch that it was noted of."""

    program: Program
    number: int
    given: Mapping[ValueId, Tensor | None]
    inputs: Sequence[Any]
    log: str
    rng_key: RngKey
    made: Digest


Kind: TypeAlias = tuple[int, Modes]
"""Of a trace, and of what is set in the thread."""
MOST_LOGS = 64


@dataclass
class Together:
    """The stages of a process, and the logs of whole micro-batches, by what a stage was given of one."""

    stages: "list[TracedStage]" = field(default_factory=list)
    logs: dict[object, list[list[list[Any]]]] = field(default_factory=dict)


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
        together: "Together | None" = None,
    ) -> None:
        self._parts, self._traces, self._stage_of = parts, traces, stage_of
        self._shallow_copy: ShallowCopy | None = None
        self._crossings: dict[int, Crossings] = {}
        self._programs: dict[object, Program] = {}  # of this run, by what they are for
        self._together = Together() if together is None else together
        self._together.stages.append(self)
        self._trials: dict[object, Trial] = {}
        self._follows: dict[object, bool] = {}  # whether programs make what is interpreted
        super().__init__(index, layers, device)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves what can be made again behind."""
        return {**vars(self), "_shallow_copy": None, "_programs": {}, "_trials": {}}

    def begin(self) -> None:
        """Begins a run: follows what was changed in the model."""
        super().begin()
        for layer in self.layers:
            if isinstance(layer.module, ModelPart):
                layer.module.follow()
        self._shallow_copy = self._shallow_copy or ShallowCopy(self._parts, self.device)
        self._shallow_copy.refresh()
        self._programs, self._trials = {}, {}

    def _run(self, value: Tree, call: StageCall) -> Tree:
        assert isinstance(value, dict)
        number, inputs, log = value["path"], value["inputs"], value["log"]
        if number not in self._crossings:
            self._crossings[number] = Crossings.of(self._traces[number], self.index, self._stage_of)
        crossings = self._crossings[number]
        values = dict(zip(crossings.enters, value["live"], strict=True))
        for route, value_id in crossings.arrives.items():
            values[value_id] = call.arrived[route]
        modes = Modes.here()
        kind = number, modes
        key = (*kind, log, *map(_lies, inputs), *map(_lies, values.values()))
        program = self._programs.get(key)
        if program is not None and self._follows.get(kind):
            interpreter = self._interpreter(StageInterpreter, number, values, [], call)
            output = interpreter.follow(program, inputs, log)
            log = json.dumps(interpreter.log) if interpreter.log else program.log
        else:
            records = program is None and self._follows.get(kind) is not False and None not in key
            given = {one: made if made is None else _copied(made) for one, made in values.items()} if records else {}
            interpreter = self._interpreter(
                RecordingInterpreter if records else StageInterpreter, number, values, json.loads(log), call
            )
            ahead = self._look_ahead(interpreter, kind, log)
            output = interpreter.go(inputs)
            before, log = log, json.dumps(interpreter.log)
            if kind in self._trials and self._trials[kind].rng_key != call.rng_key:
                self._follows[kind] = self._try(self._trials.pop(kind))
            if isinstance(interpreter, RecordingInterpreter) and interpreter.program is not None:
                self._programs[key] = program = interpreter.program
                self._pass_on(interpreter, ahead, kind, inputs)
                if kind not in self._follows and self._can_be_tried():
                    made = _made(output, interpreter)
                    self._trials[kind] = Trial(program, number, given, inputs, before, call.rng_key, made)
        if interpreter.is_last:
            return output
        for name, value_id in crossings.departs.items():
            call.held[name] = Stashed(interpreter.made.get(value_id))
        live = list(map(interpreter.made.get, crossings.leaves))
        return {"path": number, "inputs": inputs, "log": log, "live": live}

    def _interpreter(
        self,
        kind: type[StageInterpreter],
        number: int,
        values: Mapping[ValueId, Tensor | None],
        log: list[list[list[Any]]],
        call: StageCall,
    ) -> StageInterpreter:
        assert self._shallow_copy is not None
        trace, wanted = self._traces[number], self._crossings[number].wanted
        key, progress = call.rng_key, call.progress
        return kind(self._shallow_copy, trace, self.layers, values, log, wanted, self.device, key, progress)

    def _look_ahead(self, interpreter: StageInterpreter, kind: Kind, log: str) -> "list[TracedStage]":
        """Has the walk note what later stages do, too, if it is known what comes of it; gives these stages."""
        full = self._together.logs.get((*kind, log))
        if full is None or not isinstance(interpreter, RecordingInterpreter):
            return []
        later = [other for other in self._together.stages if other.index > self.index]
        ahead = [other for other in later if other.device.type == self.device.type and other._follows.get(kind)]
        ends = [other._crossings[kind[0]] for other in ahead]
        interpreter.ahead = [
            Part(other.layers, end.arriving, end.wanted) for other, end in zip(ahead, ends, strict=True)
        ]
        interpreter.full = full
        return ahead

    def _pass_on(
        self,
        noted: RecordingInterpreter,
        ahead: "Sequence[TracedStage]",
        kind: Kind,
        inputs: Sequence[Any],
    ) -> None:
        """Gives other stages their programs; notes, behind the last of this process, what came of all."""
        starts = self._traces[kind[0]].starts
        logs = {other: noted.full[: starts[other.first] + 1] for other in ahead}
        for other, program in zip(ahead, noted.noted_ahead(), strict=False):
            crossings = other._crossings[kind[0]]
            said = [noted.full[one.op + 1][one.leaf] for one in crossings.arriving]
            given = [_lies(leaf, other.device) for leaf in inputs]
            crossed = [(other.device, _stride(one[1])) if len(one) == 3 else () for one in said]
            other._programs[(*kind, json.dumps(logs[other]), *given, *crossed)] = program
        if self is self._together.stages[-1]:
            if len(self._together.logs) > MOST_LOGS:
                self._together.logs.clear()
            for other in self._together.stages:
                self._together.logs[(*kind, json.dumps(noted.log[: starts[other.first] + 1]))] = noted.log

    def _can_be_tried(self) -> bool:
        """Whether a trial calls no hooks, which users may count, and no module that another thread may be running."""
        others = {module for other in self._together.stages if other is not self for module in other.modules}
        return others.isdisjoint(self.modules) and not any(map(hooks_of, self.modules))

    def _try(self, trial: Trial) -> bool:
        """Whether a program makes what was interpreted, once another micro-batch was, with nothing left behind.

        Whatever an interpretation puts where units find it, beside what it gives them, is by now that one's.
        """
        apart = StageCall({}, trial.rng_key, LayerProgress())
        interpreter = self._interpreter(StageInterpreter, trial.number, trial.given, [], apart)
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(untouched(layer.module))
            try:
                output = interpreter.follow(trial.program, trial.inputs, trial.log)
            except Exception:  # of the user's that comes at times; it was not raised where it was interpreted
                return False
            return not differ(trial.made, _made(output, interpreter))

    def find_unsteady(self, value: Tree, call: StageCall, as_before: object) -> Layer | None:
        """None: one interpretation does all layers."""
        return None


def _lies(leaf: object, device: torch.device | None = None) -> object:
    """What of a value may lead Python elsewhere and is not written down; None of a value that cannot be compared."""
    if isinstance(leaf, Tensor):
        return (device or leaf.device, leaf.stride()) if leaf.layout is torch.strided else None
    return () if isinstance(leaf, CARRIED_AS_THEY_ARE) else None


def _stride(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _copied(tensor: Tensor) -> Tensor:
    return copy_of(tensor.detach()).requires_grad_(tensor.requires_grad)


def _made(output: Any, interpreter: StageInterpreter) -> Digest:
    return digest([output, *map(interpreter.made.get, sorted(interpreter.wanted))])


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
        """Interprets the layer."""
        stage: TracedStage = self.__dict__["stage"]
        stage.device = next((tensor.device for tensor in tensors_in(state)), stage.device)
        if stage._shallow_copy is None:
            stage.begin()
        return stage._run(state, StageCall({}, RngKey(0, 0, 0), LayerProgress()))


@contextmanager
def rng_scopes(parts: Parts, trace: Trace, key: RngKey) -> Iterator[None]:
    """Around one forward of the model itself, enters the rng_scope of each layer in turn.

    A layer ends where a block returns; the first also where the first block is called.
    """
    first_is_block = trace.ops[0].name in parts.blocks
    entered = 0

    def enter_next(*_: Any) -> None:
        nonlocal entered
        scope.close()
        scope.enter_context(rng_scope(key.seed, key.step, entered, key.micro_batch))
        entered += 1

    def before(*_: Any) -> None:
        if entered == 1 and not first_is_block:
            enter_next()

    with ExitStack() as hooks, ExitStack() as scope:
        for block in map(parts.model.get_submodule, parts.blocks):
            hooks.callback(block.register_forward_pre_hook(before).remove)
            hooks.callback(block.register_forward_hook(enter_next).remove)
        enter_next()
        yield
