"""How a row of layers is cut into stages, and what follows from it; the best cuts are found by `planner`."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal

Balance = Literal["variance", "minmax"]
TOLERANCE = 1e-12  # by what share of the mean two stages may differ and yet count as alike


@dataclass(frozen=True)
class Memory:
    """What layers need and devices have, in bytes.

    A stage holds `state` and `inside` of its layers, and `in_flight` times the `boundary` of its first layer.

    Attributes:
        state: Of each layer, weights, gradients and optimizer state.
        boundary: Of each layer, what one micro-batch brings into it if its stage begins there.
        inside: Of each layer, what one micro-batch leaves inside it for the backward pass.
        limits: What the device of a stage holds (infinity: any amount), one for all stages or one for each.
        in_flight: Micro-batches whose boundary tensors are kept at once, one for all stages or one for each.

    >>> memory = Memory(state=[4, 4, 1, 1], boundary=[1, 1, 1, 1], inside=[2, 2, 2, 2], limits=14)
    >>> given([2, 2], costs=[1, 1, 3, 1], memory=memory).bytes
    (13.0, 7.0)
    """

    state: Sequence[float]
    boundary: Sequence[float]
    inside: Sequence[float]
    limits: float | Sequence[float]
    in_flight: float | Sequence[float] = 1


@dataclass(frozen=True)
class Chain:
    """Layers in a row, and a device for each stage. `checked_chain` builds it.

    `held` is the bytes of each layer wherever it is, `boundary` those per micro-batch in flight if it comes first.
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
        """What no stage exceeds."""
        return sum(self.costs) / min(self.speeds) + 2 * max(self.transfers, default=0)


@dataclass(frozen=True)
class Partition:
    """How many consecutive layers each stage takes, and all that follows from it.

    >>> given([2, 3], [3, 1, 1, 1, 2])
    Partition(layers=(2, 3))
    """

    layers: tuple[int, ...]
    chain: Chain = field(repr=False)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The first layer of each stage, and the one after its last."""
        return tuple(pairwise(accumulate(self.layers, initial=0)))

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first layer of each stage but the first."""
        return tuple(first for first, _ in self.bounds[1:])

    @property
    def seconds(self) -> tuple[float, ...]:
        """What each stage costs: its layers over its speed, and the transfers at its ends; in the unit of costs."""
        chain, moved = self.chain, (0.0, *self.chain.transfers, 0.0)
        each = zip(chain.speeds, self.bounds, strict=True)
        return tuple(math.fsum(chain.costs[a:b]) / speed + moved[a] + moved[b] for speed, (a, b) in each)

    @property
    def bytes(self) -> tuple[float, ...]:
        """What each stage holds; zeros if no memory was given."""
        chain, each = self.chain, zip(self.chain.in_flight, self.bounds, strict=True)
        return tuple(sum(chain.held[a:b]) + in_flight * chain.boundary[a] for in_flight, (a, b) in each)

    @property
    def mean(self) -> float:
        """What each stage would cost if layers could be divided at will and transfers cost nothing."""
        return sum(self.chain.costs) / sum(self.chain.speeds)

    @property
    def lower_bound(self) -> float:
        """The least cost of a slowest stage, which is the mean, or the biggest layer on the fastest device."""
        return max(self.mean, max(self.chain.costs) / max(self.chain.speeds))

    @property
    def imbalance(self) -> float:
        """How much more than the mean the slowest stage costs, in percent."""
        return max(0.0, _percent(max(self.seconds), self.mean) - 100)

    @property
    def gap(self) -> float:
        """How much more than the lower bound the slowest stage costs, in percent."""
        return max(0.0, _percent(max(self.seconds), self.lower_bound) - 100)

    @property
    def obstacle(self) -> int | None:
        """The layer that keeps the slowest stage from being faster; None if no layer does.

        It is the only layer of that stage, or the one at its edge that would make the stage next to it as slow, or
        too big for its device, if it moved there (of two, the one that would do so less).
        """
        slowest = max(self.seconds) * (1 - TOLERANCE)
        for stage, (own, (first, end)) in enumerate(zip(self.seconds, self.bounds, strict=True)):
            if own >= slowest > self.mean:
                after = {first: self._after_move(stage, stage - 1), end - 1: self._after_move(stage, stage + 1)}
                layer = min(after, key=after.__getitem__)
                if after[layer] >= slowest:
                    return layer
        return None

    def _after_move(self, stage: int, target: int) -> float:
        """The slower of two neighbours once `stage` gave `target` its edge layer; infinite if that cannot be."""
        change = {stage: -1, target: 1}
        if not 0 <= target < len(self.layers) or self.layers[stage] == 1:
            return math.inf
        moved = replace(self, layers=tuple(own + change.get(at, 0) for at, own in enumerate(self.layers)))
        fits = all(moved.bytes[at] <= self.chain.limits[at] for at in change)
        return max(moved.seconds[at] for at in change) if fits else math.inf


def given(
    layers: Sequence[int],
    costs: Sequence[float],
    *,
    speeds: Sequence[float] | None = None,
    transfers: Sequence[float] | None = None,
    memory: Memory | None = None,
) -> Partition:
    """Takes the layers of each stage as they are; the other arguments are those of `planner.search.cuts.partition`.

    Limits of memory are not enforced.

    Raises:
        ValueError: A stage is empty, layers are left over or missing, or another argument cannot be.

    >>> given([3, 2], [3, 1, 1, 1, 2]).cuts
    (3,)
    """
    wrong = [f"stage {stage} takes {own} layers, must take at least 1" for stage, own in enumerate(layers) if own < 1]
    if sum(layers) != len(costs):
        wrong.append(f"the stages take {sum(layers)} layers together, must take all {len(costs)}")
    return Partition(tuple(layers), checked_chain(costs, len(layers), speeds, transfers, memory, wrong))


def checked_chain(
    costs: Sequence[float],
    stages: int,
    speeds: Sequence[float] | None,
    transfers: Sequence[float] | None,
    memory: Memory | None,
    wrong: list[str],
) -> Chain:
    """Layers and devices as a `Chain`; a ValueError says all that cannot be, behind what is `wrong` already."""
    layers, devices = len(costs), max(stages, 0)
    zero = _each(0, layers)
    speeds = _each(1, devices) if speeds is None else speeds
    transfers = zero[1:] if transfers is None else transfers
    memory = Memory(zero, zero, zero, math.inf) if memory is None else memory
    limits, in_flight = _each(memory.limits, devices), _each(memory.in_flight, devices)
    if not 1 <= stages <= layers:
        wrong.append(f"{stages} stages for {layers} layers, must be 1 to {layers}, so that none is empty")
    wrong += _wrong("costs", costs, layers)
    wrong += _wrong("speeds", speeds, devices, positive=True)
    wrong += _wrong("transfers", transfers, len(zero[1:]))
    wrong += _wrong("memory.state", memory.state, layers)
    wrong += _wrong("memory.boundary", memory.boundary, layers)
    wrong += _wrong("memory.inside", memory.inside, layers)
    wrong += _wrong("memory.limits", limits, devices, positive=True, most=math.inf)
    wrong += _wrong("memory.in_flight", in_flight, devices)
    if wrong:
        raise ValueError("; ".join(wrong))
    held = [state + inside for state, inside in zip(memory.state, memory.inside, strict=True)]
    numbers = (costs, speeds, transfers, held, memory.boundary, limits, in_flight)
    chain = Chain(*(tuple(map(float, each)) for each in numbers))
    if max(chain.longest, sum(chain.speeds)) == math.inf:
        raise ValueError("a stage's seconds or the sum of speeds exceed the largest number: take larger units")
    return chain


def _wrong(
    name: str, values: Sequence[float], count: int, positive: bool = False, most: float = sys.float_info.max
) -> Iterator[str]:
    if len(values) != count:
        yield f"{name} has {len(values)} entries, must have {count}"
    least = math.ulp(0) if positive else 0
    bad = [f"{name}[{at}] is {value}" for at, value in enumerate(values) if not least <= value <= most]
    if bad:
        limits = f"{'more than' if positive else 'at least'} 0{'' if most == math.inf else ' and finite'}"
        yield f"{', '.join(bad)}, must be {limits}"


def _each(value: float | Sequence[float], count: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,) * count


def _percent(value: float, base: float) -> float:
    return 100 * value / base if base else math.inf if value else 100.0
