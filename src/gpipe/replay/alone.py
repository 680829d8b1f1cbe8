"""Layers of a model that run one by one, everything that lives handed on: to measure what each costs."""

from collections.abc import Sequence

import torch
from torch import nn

from gpipe.layers.stage import Layer, LayerProgress, RngKey
from gpipe.replay.path import Path
from gpipe.replay.segment import Segment
from gpipe.replay.skeleton import Parts
from gpipe.replay.stage import ReplayedStage, Ways
from gpipe.values.tree import Tree, tensors_in


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
