"""A stage of a model that is replayed: one walk through the model does all of its layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe.layers.skips import Pop, Stashed
from gpipe.layers.stage import Layer, LayerProgress, RngKey, Stage
from gpipe.replay.layout_log import describe, read, written
from gpipe.replay.path import Path, Tag, is_carried
from gpipe.replay.replay import Replay
from gpipe.replay.segment import Segment
from gpipe.replay.skeleton import Parts, Skeleton
from gpipe.replay.structure import Leaves
from gpipe.values.tree import Tree


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
