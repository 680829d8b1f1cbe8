"""What layers cost, by the rows of a micro-batch, and what stages of them then cost on devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import add
from typing import Literal

from gpipe.planner.search.device import Device
from gpipe.schedule.cost import VERIFIED_MICRO_BATCHES, StageCost


@dataclass(frozen=True)
class Line:
    """A number that grows with the rows of a micro-batch."""

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: float) -> float:
        return self.fixed + self.per_row * rows


NOTHING = Line()


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs: work in the unit of its `Profile`, and bytes."""

    name: str
    forward: Line  # work of one forward
    backward: Line  # of one backward
    boundary: Line = NOTHING  # bytes that the main line brings to it
    activations: Line = NOTHING  # that its forward keeps for its backward, beside what came in
    keeps_input: Line = NOTHING  # of what came in that it keeps, and the layer before does not
    working: Line = NOTHING  # that its backward needs beside at the most: gradients of what it gave and took, others
    state: float = 0.0  # of its weights, gradients and optimizer
    popped: tuple[tuple[int, Line], ...] = ()  # that come in by skip connections, by the layer that stashed them
    parts: tuple[Line, Line] | None = None  # work of the backward for the input and the weights; None: half each
    recompute: Line | None = None  # work of a recompute; None: that of a forward
    leaving: Line = NOTHING  # of what it gives and does not keep: behind a stage's last layer the graph or loss does
    # that the first part of its backward leaves for the second; that each needs
    halves: tuple[Line, ...] | None = None
    gradients: float = 0.0  # of its weights
    buffers: float = 0.0  # of its buffers, of which each micro-batch that is recomputed has a copy


@dataclass(frozen=True)
class Profile:
    """What all layers of a network cost, in floating-point operations or seconds on the first of the devices."""

    layers: tuple[LayerProfile, ...]
    unit: Literal["flops", "seconds"] = "flops"

    def of_micro_batch(self, rows: float) -> "SizedProfile":
        return SizedProfile(self.layers, rows)

    def speeds(self, devices: Sequence[Device]) -> list[float]:
        """The work that each device does in a second."""
        return [device.flops / (1 if self.unit == "flops" else devices[0].flops) for device in devices]


@dataclass(frozen=True)
class SizedProfile:
    """What layers cost for micro-batches of one size: of each its work, and the bytes that it brings and keeps."""

    layers: tuple[LayerProfile, ...]
    rows: float

    def _each(self, line: Callable[[LayerProfile], Line]) -> list[float]:
        return [line(layer).at(self.rows) for layer in self.layers]

    @cached_property
    def forward(self) -> list[float]:
        return self._each(lambda layer: layer.forward)

    @cached_property
    def backward(self) -> list[float]:
        return self._each(lambda layer: layer.backward)

    @cached_property
    def work(self) -> list[float]:
        return list(map(add, self.forward, self.backward))

    @cached_property
    def parts(self) -> list[tuple[float, float]]:
        """The work of each layer's backward for its input alone, and for its weights; half each if not known."""
        known = zip((layer.parts for layer in self.layers), self.backward, strict=True)
        return [(p[0].at(self.rows), p[1].at(self.rows)) if p else (whole / 2, whole / 2) for p, whole in known]

    @cached_property
    def kept(self) -> list[float]:
        """The bytes that each layer keeps for its backward, if it is not the first of its stage."""
        return list(
            map(add, self._each(lambda layer: layer.activations), self._each(lambda layer: layer.keeps_input))
        )

    def entering(self, first: int, end: int) -> float:
        """The bytes that a stage of the layers from `first` to before `end` is sent, skip connections included."""
        skips = {source: line.at(self.rows) for layer in self.layers[first:end] for source, line in layer.popped}
        sent = sum(size for source, size in skips.items() if source < first)
        return self.layers[first].boundary.at(self.rows) + sent

    def working(self, first: int, end: int) -> float:
        """The bytes beside what is kept, when a backward holds most: what later layers kept is gone by then.

        That of the loss needs its gradient, and that of what it kept.
        """
        most, gone = 2 * (loss := self._loss(end)), loss
        for layer in range(end - 1, first - 1, -1):
            most = max(most, self.layers[layer].working.at(self.rows) - gone)
            gone += self.kept[layer]
        return most

    def halves(self, first: int, end: int) -> tuple[float, float, float]:
        """The bytes that the first part of a backward leaves for the second, and that each needs beside at the most.

        While a layer has its first part, later ones have left theirs for the second; then these are gone first.
        """
        late, inputs, weights, gone = 0.0, 2 * (loss := self._loss(end)), 0.0, loss
        for layer in range(end - 1, first - 1, -1):
            left, beside, then = (line.at(self.rows) for line in self.layers[layer].halves or (NOTHING,) * 3)
            inputs = max(inputs, late - gone + beside)
            weights = max(weights, then - late)
            gone += self.kept[layer]
            late += left
        return late, max(inputs, late - gone), weights

    def _loss(self, end: int) -> float:
        """The bytes that a loss keeps, if there is one behind these layers."""
        return self.layers[-1].leaving.at(self.rows) if end == len(self.layers) else 0.0

    def cost(self, first: int, end: int, speed: float) -> StageCost:
        """What a stage of the layers from `first` to before `end` costs, but for its messages."""
        own, run = self.layers[first:end], slice(first, end)
        known, counted = (all(layer.parts for layer in own), all(layer.halves for layer in own))
        inputs, weights = (sum(part) / speed if known else None for part in zip(*self.parts[run], strict=True))
        late, beside, then = map(round, self.halves(first, end))
        buffers, entering = sum(layer.buffers for layer in own), self.entering(first, end)
        sent_forward = 0 if end == len(self.layers) else self.layers[end].boundary.at(self.rows)
        inside = sum(self.kept[run]) - own[0].keeps_input.at(self.rows) + own[-1].leaving.at(self.rows)
        return StageCost(
            sum(self.forward[run]) / speed,
            sum(self.backward[run]) / speed,
            inputs,
            weights,
            sum((layer.recompute or layer.forward).at(self.rows) for layer in own) / speed,
            boundary=round(entering + buffers),
            activations=round(inside),
            working=round(self.working(first, end)),
            state=round(sum(layer.state for layer in own)),
            sent_forward=round(sent_forward),
            sent_backward=round(entering) if first else 0,
            late=late if counted else None,
            working_input=beside if counted else None,
            working_weight=then,
            # A loss is given copies of outputs and targets once more, when it is checked.
            recorded=round(VERIFIED_MICRO_BATCHES * (entering + buffers + max(sent_forward, 3 * self._loss(end)))),
            gradients=round(sum(layer.gradients for layer in own)),
        )


def bounds(layers: Sequence[int]) -> list[tuple[int, int]]:
    """The first layer of each stage, and the one after its last."""
    return list(pairwise(accumulate(layers, initial=0)))
