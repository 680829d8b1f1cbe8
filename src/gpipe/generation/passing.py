"""A forward of one micro-batch in generation, on its way from stage to stage."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from gpipe._torch.trees import map_tensors
from gpipe.generation.caches import (
    Layout,
    Place,
    is_cache,
    layers_in,
    layout_of,
    put_stand_ins,
    seen_by,
    stand_ins,
)
from gpipe.stages.tree import Tree
from gpipe.tracing.interpreter import StageInterpreter, describe
from gpipe.tracing.runs import ForwardArguments
from gpipe.tracing.trace import Trace, ValueId, take_apart

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
    def begin(cls, path: Path, given: ForwardArguments) -> "Passing":
        """Before the first stage."""
        leaves, _ = take_apart(tuple(given))
        cache = cache_in(given)
        live = {value_id: leaves[value_id.leaf] for value_id in path.trace.carried}
        inputs = [None if ValueId(-1, at) in live else leaf for at, leaf in enumerate(leaves)]
        return cls(path, inputs, cache, {} if cache is None else stand_ins(cache), [describe(leaves)], live)

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
        with nullcontext() if self.cache is None else seen_by(self.cache, own, self.before):
            self.output = interpreter.go(inputs)
        self.live = {value_id: interpreter.made.get(value_id) for value_id in leaving}
        if tells and self.cache is not None:
            self.layouts |= {
                place: layout_of(layer) for place, layer in layers_in(self.cache).items() if place in own
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
            put_stand_ins(self.cache, {place: heard[place] for place in sorted(heard) if place not in own})
        leaves = [self.cache if at in self.path.caches else leaf for at, leaf in enumerate(message["output"])]
        return self.path.trace.output.filled(leaves)

    def _told(self) -> str:
        return json.dumps([[*place, layout] for place, layout in self.layouts.items()])


def _heard(message: Any) -> dict[Place, Layout]:
    return {(part, at): layout for part, at, layout in json.loads(message["caches"])}
