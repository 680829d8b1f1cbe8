"""Represents the costs of layers as functions of the rows of a micro-batch, and computes the costs of stages."""

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
    """A cost that is a linear function of the rows of a micro-batch."""

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: float) -> float:
        return self.fixed + self.per_row * rows


NOTHING = Line()


@dataclass(frozen=True)
class LayerProfile:
    """The cost of one layer: its work in the unit of the `Profile`, and its bytes.

    Attributes:
        name: The name of the layer.
        forward: Work of a forward.
        backward: Work of a whole backward.
        boundary: Bytes of the input on the main route.
        activations: Bytes that a forward saves for the backward, without the input.
        keeps_input: Bytes of the input, as far as this layer saves it for the backward and the preceding layer does
            not.
        working: Peak bytes of temporary tensors in a backward, including the gradients of input and output.
        state: Bytes of weights, buffers, gradients and optimizer state.
        weights: Bytes of the weights.
        popped: Bytes that arrive by skip connections, with the index of the layer that stashed them.
        parts: Work of the input-gradient and the weight-gradient pass. None means half of `backward` each.
        recompute: Work of a recompute. None means `forward`.
        leaving: Bytes of the output that the layer does not save. At the end of a stage, the graph or the loss keeps
            this output.
        halves: Bytes that an input-gradient pass keeps for the weight-gradient pass, and the temporary bytes of both
            passes.
        gradients: Bytes of the gradients of the weights.
        buffers: Bytes of the buffers. Each micro-batch that is recomputed needs a copy of the buffers.
    """

    name: str
    forward: Line
    backward: Line
    boundary: Line = NOTHING
    activations: Line = NOTHING
    keeps_input: Line = NOTHING
    working: Line = NOTHING
    state: float = 0.0
    weights: float = 0.0
    popped: tuple[tuple[int, Line], ...] = ()
    parts: tuple[Line, Line] | None = None
    recompute: Line | None = None
    leaving: Line = NOTHING
    halves: tuple[Line, ...] | None = None
    gradients: float = 0.0
    buffers: float = 0.0


@dataclass(frozen=True)
class Profile:
    """The costs of all layers of a model. Work is in floating-point operations, or in seconds on the first device."""

    layers: tuple[LayerProfile, ...]
    unit: Literal["flops", "seconds"] = "flops"

    def of_micro_batch(self, rows: float) -> "SizedProfile":
        return SizedProfile(self.layers, rows)

    def speeds(self, devices: Sequence[Device]) -> list[float]:
        """Returns the work that each device does per second."""
        return [device.flops / (1 if self.unit == "flops" else devices[0].flops) for device in devices]


@dataclass(frozen=True)
class SizedProfile:
    """The costs of layers for micro-batches with a fixed number of rows."""

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
        """The work of both passes of a split backward for each layer; half of the backward each if unknown."""
        known = zip((layer.parts for layer in self.layers), self.backward, strict=True)
        return [(p[0].at(self.rows), p[1].at(self.rows)) if p else (whole / 2, whole / 2) for p, whole in known]

    @cached_property
    def least_joined(self) -> tuple[float, float, float]:
        """The work on the path of one micro-batch, the work of all layers, and the work of the largest layer."""
        return self._least(self.backward, self.backward)

    @cached_property
    def least_split(self) -> tuple[float, float, float]:
        """The same as `least_joined`, if each backward is split where this is less work."""
        path = [min(inputs, back) for (inputs, _), back in zip(self.parts, self.backward, strict=True)]
        return self._least(
            path, [min(sum(parts), back) for parts, back in zip(self.parts, self.backward, strict=True)]
        )

    def _least(self, path: Sequence[float], backward: Sequence[float]) -> tuple[float, float, float]:
        work = list(map(add, self.forward, backward))
        return sum(self.forward) + sum(path), sum(work), max(work)

    @cached_property
    def state(self) -> float:
        """The bytes of weights, gradients and optimizer state of all layers."""
        return sum(layer.state for layer in self.layers)

    @cached_property
    def activations(self) -> float:
        """The bytes that all layers save for the backward, without the input."""
        return sum(self._each(lambda layer: layer.activations))

    @cached_property
    def kept(self) -> list[float]:
        """The bytes that each layer saves for its backward, if it is not the first layer of its stage."""
        return list(
            map(add, self._each(lambda layer: layer.activations), self._each(lambda layer: layer.keeps_input))
        )

    def entering(self, first: int, end: int) -> float:
        """Returns the bytes that a stage of layers `first` to `end - 1` receives, including skip connections."""
        skips = {source: line.at(self.rows) for layer in self.layers[first:end] for source, line in layer.popped}
        sent = sum(size for source, size in skips.items() if source < first)
        return self.layers[first].boundary.at(self.rows) + sent

    def working(self, first: int, end: int) -> float:
        """Returns the peak of temporary bytes in a backward, minus activations that are freed before the peak.

        The backward of the loss needs two gradients: of the input of the loss, and of the tensor that the loss saved.
        """
        most, freed = 2 * (loss := self._loss(end)), loss
        for layer in range(end - 1, first - 1, -1):
            most = max(most, self.layers[layer].working.at(self.rows) - freed)
            freed += self.kept[layer]
        return most

    def halves(self, first: int, end: int) -> tuple[float, float, float]:
        """Returns the bytes that a split backward keeps between its passes, and the temporary peak of each pass.

        In the input-gradient pass, later layers already keep tensors for the weight-gradient pass. That pass frees
        the tensors of later layers first.
        """
        late, inputs, weights, freed = 0.0, 2 * (loss := self._loss(end)), 0.0, loss
        for layer in range(end - 1, first - 1, -1):
            lines = self.layers[layer].halves or (NOTHING,) * 3
            kept, in_inputs, in_weights = (line.at(self.rows) for line in lines)
            inputs = max(inputs, late - freed + in_inputs)
            weights = max(weights, in_weights - late)
            freed += self.kept[layer]
            late += kept
        return late, max(inputs, late - freed), weights

    def _loss(self, end: int) -> float:
        """Returns the bytes that the loss keeps, if the stage ends with the last layer."""
        return self.layers[-1].leaving.at(self.rows) if end == len(self.layers) else 0.0

    def cost(self, first: int, end: int, speed: float, *, on_host: bool = False) -> StageCost:
        """Returns the cost of a stage with the layers `first` to `end - 1`, without its messages.

        `on_host` is whether LOAD copies the weights from host memory. Default: False.
        """
        stage, run = self.layers[first:end], slice(first, end)
        known, counted = (all(layer.parts for layer in stage), all(layer.halves for layer in stage))
        inputs, weights = (sum(part) / speed if known else None for part in zip(*self.parts[run], strict=True))
        late, working_input, working_weight = map(round, self.halves(first, end))
        buffers, entering = sum(layer.buffers for layer in stage), self.entering(first, end)
        state = sum(layer.state for layer in stage)
        streamed = state - buffers if on_host else 0.0
        sent_forward = 0 if end == len(self.layers) else self.layers[end].boundary.at(self.rows)
        inside = sum(self.kept[run]) - stage[0].keeps_input.at(self.rows) + stage[-1].leaving.at(self.rows)
        return StageCost(
            sum(self.forward[run]) / speed,
            sum(self.backward[run]) / speed,
            inputs,
            weights,
            sum((layer.recompute or layer.forward).at(self.rows) for layer in stage) / speed,
            boundary=round(entering + buffers),
            activations=round(inside),
            working=round(self.working(first, end)),
            state=round(state - streamed),
            sent_forward=round(sent_forward),
            sent_backward=round(entering) if first else 0,
            late=late if counted else None,
            working_input=working_input if counted else None,
            working_weight=working_weight,
            # When the loss is checked, it receives further copies of outputs and targets.
            recorded=round(VERIFIED_MICRO_BATCHES * (entering + buffers + max(sent_forward, 3 * self._loss(end)))),
            gradients=round(sum(layer.gradients for layer in stage)),
            loaded=round(sum(layer.weights for layer in stage)) if on_host else 0,
            on_host=round(streamed),
        )


def bounds(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the first layer of each stage, and the layer after its last."""
    return list(pairwise(accumulate(layers, initial=0)))
