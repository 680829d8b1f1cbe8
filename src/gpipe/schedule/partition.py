"""Cuts a row of layers into stages: least variance of the stages' costs (the paper), or least slowest stage.

`cuts` finds the layers of each stage; here is what is asked of it, and what follows from its answer.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal, get_args

from gpipe.schedule.cuts import TOLERANCE, Chain, least_excess, least_slowest, least_variance

Balance = Literal["variance", "minmax"]


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
    >>> partition([1, 1, 1, 1], 2).layers, partition([1, 1, 3, 1], 2, memory=memory).bytes
    ((2, 2), (13.0, 7.0))
    """

    state: Sequence[float]
    boundary: Sequence[float]
    inside: Sequence[float]
    limits: float | Sequence[float]
    in_flight: float | Sequence[float] = 1


@dataclass(frozen=True)
class Partition:
    """The answer: how many consecutive layers each stage takes, and all that follows from it.

    >>> partition([3, 1, 1, 1, 2], 2)
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

        >>> partition([1, 1, 5, 1, 1], 3).obstacle
        2
        """
        slowest = max(self.seconds) * (1 - TOLERANCE)
        for stage, (own, (first, end)) in enumerate(zip(self.seconds, self.bounds, strict=True)):
            if own >= slowest > self.mean:
                after = {first: self._after_move(stage, stage - 1), end - 1: self._after_move(stage, stage + 1)}
                layer = min(after, key=after.__getitem__)
                if after[layer] >= slowest:
                    return layer
        return None

    def explain(self, names: Sequence[str] | None = None) -> str:
        """Says what each stage costs and holds, how far that is from the best thinkable, and what is in the way.

        >>> print(partition([1, 1, 6, 1, 1], 3).explain("abcde"))
        stage 0: a to b (2): cost 2, 60% of the mean
        stage 1: c (1): cost 6, 180% of the mean
        stage 2: d to e (2): cost 2, 60% of the mean
        slowest stage: 80.0% over the mean 3.33333, 0.0% over the lower bound 6
        in the way: c, cost 6

        Raises:
            ValueError: There are not as many names as layers.
        """
        costs = self.chain.costs
        names = [f"layer {layer}" for layer in range(len(costs))] if names is None else names
        if len(names) != len(costs):
            raise ValueError(f"{len(names)} names for {len(costs)} layers: give one for each")
        lines = [self._line(stage, names) for stage in range(len(self.layers))]
        bound = f"{self.gap:.1f}% over the lower bound {self.lower_bound:.6g}"
        lines.append(f"slowest stage: {self.imbalance:.1f}% over the mean {self.mean:.6g}, {bound}")
        if (layer := self.obstacle) is not None:
            lines.append(f"in the way: {names[layer]}, cost {costs[layer]:.6g}")
        return "\n".join(lines)

    def _line(self, stage: int, names: Sequence[str]) -> str:
        first, end = self.bounds[stage]
        which = names[first] if end - first == 1 else f"{names[first]} to {names[end - 1]}"
        cost, held, limit = self.seconds[stage], self.bytes[stage], self.chain.limits[stage]
        share = f"{_percent(cost, self.mean):.0f}% of the mean"
        memory = f"; {held:,.15g} bytes of {limit:,.15g}" if held else ""
        over = " (TOO MUCH)" if held > limit else ""
        return f"stage {stage}: {which} ({end - first}): cost {cost:.6g}, {share}{memory}{over}"

    def _after_move(self, stage: int, target: int) -> float:
        """The slower of two neighbours once `stage` gave `target` its edge layer; infinite if that cannot be."""
        change = {stage: -1, target: 1}
        if not 0 <= target < len(self.layers) or self.layers[stage] == 1:
            return math.inf
        moved = replace(self, layers=tuple(own + change.get(at, 0) for at, own in enumerate(self.layers)))
        fits = all(moved.bytes[at] <= self.chain.limits[at] for at in change)
        return max(moved.seconds[at] for at in change) if fits else math.inf


def partition(
    costs: Sequence[float],
    stages: int,
    *,
    balance: Balance = "variance",
    speeds: Sequence[float] | None = None,
    transfers: Sequence[float] | None = None,
    memory: Memory | None = None,
) -> Partition:
    """Finds the best cuts of all (paper, section 2.1: partitioning minimizes the variance of the estimated costs).

    Stage k lasts t_k: the costs of its layers over its speed, and the transfers at its ends. `"variance"` minimizes
    the sum of (t_k - mean)^2, mean = sum of costs / sum of speeds; `"minmax"` minimizes max t_k, and the variance
    among those. Of ties, the one whose earlier stages have more layers. Costs that are all zero count as equal.

    Args:
        costs: Of each layer, in seconds at speed 1 or in any other unit.
        stages: How many, at most one for each layer.
        balance: What is minimized.
        speeds: Of the stages' devices; 1 each if not given.
        transfers: Of each cut, the first behind layer 0: what each of the two stages beside it spends on it, one
            sending and one receiving; in the unit of the costs, whatever the speeds.
        memory: What layers need and devices hold; no stage exceeds it.

    Raises:
        ValueError: Arguments that cannot be (all of them), or no cuts that fit in memory, with what would.

    >>> partition([1, 1, 1, 1, 4, 4], 3).layers
    (4, 1, 1)
    >>> partition([5] * 6, 2, speeds=[2, 1]).seconds
    (10.0, 10.0)
    """
    wrong = [] if balance in get_args(Balance) else [f"balance is {balance!r}: choose from {get_args(Balance)}"]
    chain = _checked(costs, stages, speeds, transfers, memory, wrong)
    layers = least_variance(chain) if balance == "variance" else least_slowest(chain)
    if layers is None:
        raise ValueError(_why_nothing_fits(chain))
    return Partition(layers, chain)


def given(
    layers: Sequence[int],
    costs: Sequence[float],
    *,
    speeds: Sequence[float] | None = None,
    transfers: Sequence[float] | None = None,
    memory: Memory | None = None,
) -> Partition:
    """Takes the layers of each stage as they are; the other arguments are those of `partition`.

    Limits of memory are not enforced: `Partition.explain` marks a stage that exceeds them.

    Raises:
        ValueError: A stage is empty, layers are left over or missing, or another argument cannot be.

    >>> given([3, 2], [3, 1, 1, 1, 2]).cuts
    (3,)
    """
    wrong = [f"stage {stage} takes {own} layers, must take at least 1" for stage, own in enumerate(layers) if own < 1]
    if sum(layers) != len(costs):
        wrong.append(f"the stages take {sum(layers)} layers together, must take all {len(costs)}")
    return Partition(tuple(layers), _checked(costs, len(layers), speeds, transfers, memory, wrong))


def _checked(
    costs: Sequence[float],
    stages: int,
    speeds: Sequence[float] | None,
    transfers: Sequence[float] | None,
    memory: Memory | None,
    wrong: list[str],
) -> Chain:
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
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        limits = f"{'more than' if positive else 'at least'} 0{'' if most == math.inf else ' and finite'}"
        yield f"{', '.join(bad[:3])}{more}, must be {limits}"


def _each(value: float | Sequence[float], count: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,) * count


def _percent(value: float, base: float) -> float:
    return 100 * value / base if base else math.inf if value else 100.0


def _why_nothing_fits(chain: Chain) -> str:
    """Names the layers that no device holds, or else the cuts that need the least enlargement of all devices."""
    limits, most = chain.limits, max(chain.limits)
    if big := [f"layer {at} needs {held:,.15g} bytes" for at, held in enumerate(chain.held) if held > most]:
        return f"{', '.join(big)}, the largest device holds {most:,.15g}: divide the layer, or take a larger device"

    nearest = Partition(least_excess(chain), chain)
    ratios = [held / limit for held, limit in zip(nearest.bytes, limits, strict=True)]
    worst = ratios.index(max(ratios))
    first, end = nearest.bounds[worst]
    return (
        f"no cuts into {len(limits)} stages fit in memory. The nearest need {ratios[worst]:.4g} times the limits: "
        f"stage {worst} with layers {first} to {end - 1} needs {nearest.bytes[worst]:,.15g} bytes of "
        f"{limits[worst]:,.15g}. Take larger devices, more stages, smaller micro-batches or fewer in flight"
    )
