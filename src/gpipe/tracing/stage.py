"""A stage of a model that is replayed: one walk through the model does all of its layers.

Layers of a model that run one by one, everything that lives handed on: to measure what each costs.

Has a model draw random numbers as a pipe of it does: the reference, entered by forward hooks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.stages.rng import rng_scope
from gpipe.stages.skips import Pop, Stashed
from gpipe.stages.stage import Layer, LayerProgress, RngKey, Stage
from gpipe.stages.tree import Tree, tensors_in
from gpipe.tracing.interpreter import Replay
from gpipe.tracing.parts import Segment
from gpipe.tracing.shallow_copy import Parts, Skeleton
from gpipe.tracing.trace import Path
from gpipe.tracing.values import Leaves, Tag, describe, is_carried, read, written


def state_of(number: int, leaves: Leaves) -> dict[str, Tree]:
    """What the main line brings to the first stage: inputs, of which a log says what they are, and the path's number.

    Between stages it brings what later events returned, too.
    """
    return {
        "path": number,
        "inputs": [None if is_carried(leaf) else leaf for leaf in leaves],
        "log": written([describe(leaves)]),
        "live": [leaf for leaf in leaves if is_carried(leaf)],
    }


def pops_between(path: Path, stage_of: Sequence[int]) -> list[Pop]:
    """The uses of tensors that have routes of their own: between neighbours the main line brings all."""
    return [hop.pop for hop in path.hops if stage_of[hop.source] + 1 < stage_of[hop.target]]


@dataclass(frozen=True)
class Ways:
    """What crosses into a stage and out of it, on one path.

    Attributes:
        enters: What the main line brings, in order.
        arrives: What skip routes bring, by their names.
        leaves: What the main line takes on, in order.
        departs: What skip routes take on, by the names of stashes.
    """

    enters: tuple[Tag, ...]
    arrives: Mapping[str, Tag]
    leaves: tuple[Tag, ...]
    departs: Mapping[str, Tag]

    @classmethod
    def of(cls, path: Path, stage: int, stage_of: Sequence[int]) -> "Ways":
        """Looks them up."""
        ends = [(hop, stage_of[hop.source], stage_of[hop.target]) for hop in path.hops]
        return cls(
            path.carried if stage == 0 else tuple(hop.tag for hop, a, b in ends if a + 1 == b == stage),
            {hop.pop.route_name: hop.tag for hop, a, b in ends if a + 1 < b == stage},
            tuple(hop.tag for hop, a, b in ends if stage == a == b - 1),
            {hop.pop.name: hop.tag for hop, a, b in ends if stage == a < b - 1},
        )

    @property
    def wanted(self) -> frozenset[Tag]:
        """All that leaves."""
        return frozenset((*self.leaves, *self.departs.values()))


class ReplayedStage(Stage):
    """Consecutive layers of a model, replayed at once.

    Args:
        index: Its number.
        layers: Its layers.
        device: Where they are.
        parts: The model.
        paths: Those that it is known to take; there may be more later on.
        stage_of: The stage of each of its layers.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        device: torch.device,
        parts: Parts,
        paths: Sequence[Path],
        stage_of: Sequence[int],
    ) -> None:
        self._parts, self._paths, self._stage_of = parts, paths, stage_of
        self._skeleton: Skeleton | None = None
        self._ways: dict[int, Ways] = {}
        super().__init__(index, layers, device)
        self.begin()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves what can be made again behind."""
        return {**vars(self), "_skeleton": None}

    def begin(self) -> None:
        """Begins a run: follows what was changed in the model."""
        super().begin()
        for layer in self.layers:
            if isinstance(layer.module, Segment):
                layer.module.follow()
        self._walkable().refresh()

    def _walkable(self) -> Skeleton:
        if self._skeleton is None:
            self._skeleton = self._parts.skeleton()
            self._skeleton.put_on(self.device)
        return self._skeleton

    def _ways_on(self, path: Path) -> Ways:
        return Ways.of(path, self.index, self._stage_of)

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
        path = self._paths[number]
        if number not in self._ways:
            self._ways[number] = self._ways_on(path)
        ways = self._ways[number]
        values = dict(zip(ways.enters, value["live"], strict=True))
        values |= {tag: arrived[route] for route, tag in ways.arrives.items()}
        log = read(value["log"])
        walk = Replay(self._walkable(), path, self.layers, values, log, ways.wanted, self.device, rng_key, progress)
        output = walk.go(value["inputs"])
        if walk.is_last:
            return output
        held |= {name: Stashed.of(walk.made.get(tag)) for name, tag in ways.departs.items()}
        live = [walk.made.get(tag) for tag in ways.leaves]
        return {"path": number, "inputs": value["inputs"], "log": written(log), "live": live}

    def find_unsteady(self, value: Tree, arrived: Mapping[str, Tensor | None], rng_key: RngKey) -> Layer | None:
        """None: a walk does all layers at once."""
        return None


class AloneLayer(nn.Module):
    """One layer, which takes what the layers before handed on and hands on what the later ones need."""

    def __init__(self, at: int, segment: Segment, parts: Parts, paths: Sequence[Path]) -> None:
        super().__init__()
        self.segment = segment
        self.__dict__["stage"] = _AloneStage(
            at, [Layer(at, segment.stands_for, segment)], torch.device("cpu"), parts, paths, ()
        )

    def forward(self, state: Tree) -> Tree:
        """Replays the layer."""
        stage: _AloneStage = self.__dict__["stage"]
        stage.device = next((tensor.device for tensor in tensors_in(state)), stage.device)
        return stage._run(state, {}, {}, RngKey(0, 0, 0), LayerProgress())


class _AloneStage(ReplayedStage):
    def _ways_on(self, path: Path) -> Ways:
        entering = path.carried if self.index == 0 else tuple(path.live_before(self.index))
        return Ways(entering, {}, tuple(path.live_before(self.index + 1)), {})


@contextmanager
def rng_scopes(parts: Parts, path: Path, key: RngKey) -> Iterator[None]:
    """Around one forward of the model itself, enters the rng_scope of each layer in turn.

    A layer ends where a block returns; the first also where the first block is called.
    """
    layers = Layers(key)
    first_is_block = path.events[0].name in parts.blocks
    calls = 0

    def before(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1 and not first_is_block:
            layers.next()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        layers.next()

    blocks = [parts.model.get_submodule(name) for name in parts.blocks]
    hooks = [hook for b in blocks for hook in (b.register_forward_pre_hook(before), b.register_forward_hook(after))]
    layers.enter()
    try:
        yield
    finally:
        layers.leave()
        for hook in hooks:
            hook.remove()


class Layers:
    """The scopes of the layers, one after another."""

    def __init__(self, key: RngKey) -> None:
        self._key, self._index = key, 0

    def enter(self) -> None:
        """Enters the scope of the layer."""
        self._rng_scope = rng_scope(self._key.seed, self._key.step, self._index, self._key.micro_batch)
        self._rng_scope.__enter__()

    def leave(self) -> None:
        """Leaves it."""
        self._rng_scope.__exit__(None, None, None)

    def next(self) -> None:
        """Goes on to the next layer."""
        self.leave()
        self._index += 1
        self.enter()
