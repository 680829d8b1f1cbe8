"""Describes how consecutive layers are split into stages, and what each stage costs in time and memory.

`gpipe.planner.search.balance` finds the best split.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal

Balance = Literal["variance", "minmax"]
TOLERANCE = 1e-12  # stages whose costs differ by at most this share of the mean count as equal


@dataclass(frozen=True)
class Memory:
    """The memory that layers need and devices have, in bytes.

    A stage needs the `state` and `activations` of its layers, plus `in_flight` times the `boundary` of its first
    layer.

    Attributes:
        state: Weights, gradients and optimizer state of each layer.
        boundary: Input of each layer for one micro-batch. Only the input of the first layer of a stage counts.
        activations: Tensors that one micro-batch saves in each layer for the backward pass.
        limits: Memory of the device of each stage, or one number for all stages. Infinity means unlimited.
        in_flight: Number of micro-batches whose stage inputs are kept at the same time: one number per stage, or one
            number for all stages.

    >>> memory = Memory(state=[4, 4, 1, 1], boundary=[1, 1, 1, 1], activations=[2, 2, 2, 2], limits=14)
    >>> Partition.of_sizes([2, 2], costs=[1, 1, 3, 1], memory=memory).bytes
    (13.0, 7.0)
    """

    state: Sequence[float]
    boundary: Sequence[float]
    activations: Sequence[float]
    limits: float | Sequence[float]
    in_flight: float | Sequence[float] = 1


@dataclass(frozen=True)
class LayerCosts:
    """The costs of consecutive layers, and the devices of the stages. `checked_layer_costs` builds instances.

    Attributes:
        costs: Seconds of each layer on a device of speed 1, or in any other unit.
        speeds: Speed of the device of each stage.
        transfers: For each possible split point, the seconds that each of the two neighboring stages spends on the
            transfer.
        held: Bytes that each layer needs in any stage.
        boundary: Bytes of the input of each layer. If the layer is the first of a stage, each micro-batch in flight
            needs these bytes.
        limits: Bytes that the device of each stage can hold.
        in_flight: The number of micro-batches whose inputs each stage keeps at the same time.
    """

    costs: tuple[float, ...]
    speeds: tuple[float, ...]
    transfers: tuple[float, ...]
    held: tuple[float, ...]
    boundary: tuple[float, ...]
    limits: tuple[float, ...]
    in_flight: tuple[float, ...]

    @property
    def longest(self) -> float:
        """An upper bound on the cost of a stage."""
        return sum(self.costs) / min(self.speeds) + 2 * max(self.transfers, default=0)


@dataclass(frozen=True)
class Partition:
    """The number of consecutive layers in each stage, and the resulting costs.

    >>> Partition.of_sizes([2, 3], [3, 1, 1, 1, 2])
    Partition(layers=(2, 3))
    """

    layers: tuple[int, ...]
    layer_costs: LayerCosts = field(repr=False)

    @classmethod
    def of_sizes(
        cls,
        sizes: Sequence[int],
        costs: Sequence[float],
        *,
        speeds: Sequence[float] | None = None,
        transfers: Sequence[float] | None = None,
        memory: Memory | None = None,
    ) -> "Partition":
        """Returns the partition whose stages have these numbers of layers. Does not enforce the limits of `memory`.

        Args:
            sizes: The number of layers in each stage.
            costs: The cost of each layer, as for `gpipe.planner.search.balance.partition`.
            speeds: The speed of the device of each stage. Default: 1.
            transfers: The time of the transfer at each possible split point, as for `partition`. Default: 0.
            memory: The memory of layers and devices, from which `bytes` is computed. Default: None, `bytes` is 0.

        Returns:
            The partition, with the costs of its stages.

        Raises:
            ValueError: If a stage is empty, if the sizes do not add up to the number of layers, or if another
                argument is invalid.

        >>> Partition.of_sizes([3, 2], [3, 1, 1, 1, 2]).cuts
        (3,)
        """
        mistakes = [f"partitions[{s}] is {size}. Use at least 1 layer." for s, size in enumerate(sizes) if size < 1]
        if sum(sizes) != len(costs):
            mistakes.append(f"partitions has {sum(sizes)} layers in total. Distribute all {len(costs)} layers.")
        return cls(tuple(sizes), checked_layer_costs(costs, len(sizes), speeds, transfers, memory, mistakes))

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For each stage, the index of its first layer, and the index after its last layer."""
        return tuple(pairwise(accumulate(self.layers, initial=0)))

    @property
    def cuts(self) -> tuple[int, ...]:
        """The split points: the index of the first layer of each stage, without stage 0."""
        return tuple(first for first, _ in self.bounds[1:])

    @property
    def seconds(self) -> tuple[float, ...]:
        """The cost of each stage: its layers at the speed of its device, plus the transfers at both ends."""
        costs, transfers = self.layer_costs, (0.0, *self.layer_costs.transfers, 0.0)
        stages = zip(costs.speeds, self.bounds, strict=True)
        return tuple(math.fsum(costs.costs[a:b]) / speed + transfers[a] + transfers[b] for speed, (a, b) in stages)

    @property
    def bytes(self) -> tuple[float, ...]:
        """The memory of each stage. Zeros if the partition was built without `memory`."""
        costs, stages = self.layer_costs, zip(self.layer_costs.in_flight, self.bounds, strict=True)
        return tuple(sum(costs.held[a:b]) + in_flight * costs.boundary[a] for in_flight, (a, b) in stages)

    @property
    def mean(self) -> float:
        """The cost of each stage if layers were divisible and transfers were free."""
        return sum(self.layer_costs.costs) / sum(self.layer_costs.speeds)

    @property
    def lower_bound(self) -> float:
        """A lower bound on the slowest stage: the mean, or the most expensive layer on the fastest device."""
        return max(self.mean, max(self.layer_costs.costs) / max(self.layer_costs.speeds))

    @property
    def imbalance(self) -> float:
        """The percentage by which the slowest stage exceeds the mean."""
        return max(0.0, _percent(max(self.seconds), self.mean) - 100)

    @property
    def gap(self) -> float:
        """The percentage by which the slowest stage exceeds the lower bound."""
        return max(0.0, _percent(max(self.seconds), self.lower_bound) - 100)

    @property
    def obstacle(self) -> int | None:
        """The layer that keeps the slowest stage from becoming faster. None if there is no such single layer.

        The layer is one of the following:

        - the only layer of the slowest stage;
        - the layer at an edge of the slowest stage whose move would make the neighboring stage as slow, or too big
          for its device. If this applies to both edge layers, the layer whose move costs less.
        """
        slowest = max(self.seconds) * (1 - TOLERANCE)
        for stage, (seconds, (first, end)) in enumerate(zip(self.seconds, self.bounds, strict=True)):
            if seconds >= slowest > self.mean:
                after = {first: self._after_move(stage, stage - 1), end - 1: self._after_move(stage, stage + 1)}
                layer = min(after, key=after.__getitem__)
                if after[layer] >= slowest:
                    return layer
        return None

    def _after_move(self, stage: int, target: int) -> float:
        """Returns the higher cost of two neighbors after `target` takes a layer of `stage`; infinity if it cannot."""
        change = {stage: -1, target: 1}
        if not 0 <= target < len(self.layers) or self.layers[stage] == 1:
            return math.inf
        moved = replace(self, layers=tuple(size + change.get(s, 0) for s, size in enumerate(self.layers)))
        fits = all(moved.bytes[s] <= self.layer_costs.limits[s] for s in change)
        return max(moved.seconds[s] for s in change) if fits else math.inf


def checked_layer_costs(
    costs: Sequence[float],
    stages: int,
    speeds: Sequence[float] | None,
    transfers: Sequence[float] | None,
    memory: Memory | None,
    mistakes: list[str],
) -> LayerCosts:
    """Returns validated costs of layers and devices.

    Raises:
        ValueError: If an argument is invalid or `mistakes` is not empty. The message lists `mistakes` first.
    """
    layers, devices = len(costs), max(stages, 0)
    zero = _per_item(0, layers)
    speeds = _per_item(1, devices) if speeds is None else speeds
    transfers = zero[1:] if transfers is None else transfers
    memory = Memory(zero, zero, zero, math.inf) if memory is None else memory
    limits, in_flight = _per_item(memory.limits, devices), _per_item(memory.in_flight, devices)
    if not 1 <= stages <= layers:
        mistakes.append(f"partitions={stages} is invalid for {layers} layers. Use 1 to {layers} stages.")
    mistakes += _invalid_numbers("costs", costs, layers)
    mistakes += _invalid_numbers("speeds", speeds, devices, positive=True)
    mistakes += _invalid_numbers("transfers", transfers, len(zero[1:]))
    for name in ("state", "boundary", "activations"):
        mistakes += _invalid_numbers(f"memory.{name}", getattr(memory, name), layers)
    mistakes += _invalid_numbers("memory.limits", limits, devices, positive=True, most=math.inf)
    mistakes += _invalid_numbers("memory.in_flight", in_flight, devices)
    if mistakes:
        raise ValueError("\n".join(mistakes))
    held = [state + activations for state, activations in zip(memory.state, memory.activations, strict=True)]
    numbers = (costs, speeds, transfers, held, memory.boundary, limits, in_flight)
    checked = LayerCosts(*(tuple(map(float, values)) for values in numbers))
    if max(checked.longest, sum(checked.speeds)) == math.inf:
        raise ValueError("costs: the seconds of a stage, or the sum of speeds, overflow a float. Use larger units.")
    return checked


def _invalid_numbers(
    name: str, values: Sequence[float], count: int, positive: bool = False, most: float = sys.float_info.max
) -> Iterator[str]:
    if len(values) != count:
        yield f"{name} has {len(values)} entries. Pass {count}."
    least = math.ulp(0) if positive else 0
    invalid = [f"{name}[{i}] is {value}" for i, value in enumerate(values) if not least <= value <= most]
    if invalid:
        limits = f"{'greater than' if positive else 'at least'} 0{'' if most == math.inf else ' and finite'}"
        yield f"{', '.join(invalid)}. Use numbers that are {limits}."


def _per_item(value: float | Sequence[float], count: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,) * count


def _percent(value: float, base: float) -> float:
    return 100 * value / base if base else math.inf if value else 100.0
