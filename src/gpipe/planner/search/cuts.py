"""Finds how many consecutive layers each stage takes, so that stages vary least, or the slowest is fastest.

Both are exact. A stage of the layers a to b-1 spans `x[b] - y[a]`: x is what the layers before b cost at the stage's
speed plus the transfer at its end, y the same before a minus the transfer at its beginning. From the last stage
back, `least[k, a]` is the best that stages k, k+1, .. make of the layers from a on: over all next cuts b, the least
of (x[b] - y[a] - mean)^2 + least[k+1, b] (variance) or of max(x[b] - y[a], least[k+1, b]) (min-max). Of the answers
to min-max, the one of least variance is taken: the same search among stages no slower than the optimum.

Costs are counted in ticks, 2^-51 of the longest stage that can be, so that sums are exact and stages alike are equal
to the last bit. Answers within 1e-12 of the best, relative to the mean (of deviations, their root mean square), tie:
the first stage takes as many layers as it can, then the second, and so on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from gpipe.schedule.partition import TOLERANCE, Balance, Chain, Memory, Partition, checked_chain

Reals: TypeAlias = npt.NDArray[np.float64]

_TICKS = 51
_FIRSTS_AT_ONCE = 64  # first layers of a stage: with all its ends, as many numbers as stay in a core's cache


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
    >>> memory = Memory(state=[4, 4, 1, 1], boundary=[1, 1, 1, 1], inside=[2, 2, 2, 2], limits=14)
    >>> partition([1, 1, 3, 1], 2, memory=memory).bytes
    (13.0, 7.0)
    """
    wrong = [] if balance in get_args(Balance) else [f"balance is {balance!r}: choose from {get_args(Balance)}"]
    chain = checked_chain(costs, stages, speeds, transfers, memory, wrong)
    search = _search(chain)
    if balance == "minmax":
        slowest = replace(search, mean=None, cap=search.dealt)
        search = replace(search, cap=slowest.tied(slowest.least()[0, 0]))
    layers = search.best()
    if layers is None:
        raise ValueError(_why_nothing_fits(chain))
    return Partition(layers, chain)


@dataclass(frozen=True)
class _Search:
    """What to minimize over all cuts: the variance of the stages' spans around `mean`, or without, the longest span.

    Layers a to b-1 as stage k span `x[k, b] - y[k, a]` and hold `held[b] - free[k, a]`. Spans above `cap` are out,
    and stages that hold more than their `limits`.
    """

    x: Reals
    y: Reals
    held: Reals
    free: Reals
    limits: tuple[float, ...]
    dealt: float  # what no stage needs to span for the least slowest, where memory is no matter
    mean: float | None
    cap: float = math.inf

    def least(self) -> Reals:
        """The table `least[k, a]` of the module's docstring."""
        stages, ends = self.x.shape
        least = np.full((stages + 1, ends), math.inf)
        least[stages, -1] = 0
        for stage in reversed(range(stages)):
            for first in range(stage, ends - stages + stage, _FIRSTS_AT_ONCE):
                firsts = slice(first, first + _FIRSTS_AT_ONCE)
                least[stage, firsts] = self._amounts(stage, firsts, least[stage + 1]).min(axis=1, initial=math.inf)
        return least

    def best(self) -> tuple[int, ...] | None:
        """The layers of each stage, each cut as far right as a tie allows; None if nothing fits."""
        least = self.least()
        if least[0, 0] == math.inf:
            return None
        allowed, spent, cuts = self.tied(least[0, 0]), 0.0, [0]
        for stage, rest in enumerate(least[1:]):
            first = cuts[-1]
            amounts = spent + self._amounts(stage, slice(first, first + 1), rest)[0]
            end = first + int(np.flatnonzero(amounts <= max(allowed, amounts.min()))[-1])
            if self.mean is not None:
                spent += (self.x[stage, end] - self.y[stage, first] - self.mean) ** 2
            cuts.append(end)
        return tuple(np.diff(cuts).tolist())

    def tied(self, best: float) -> float:
        """The largest amount that still ties with the best."""
        if self.mean is None:
            return best * (1 + TOLERANCE)
        return (math.sqrt(best) * (1 + TOLERANCE) + self.mean * TOLERANCE) ** 2

    def _amounts(self, stage: int, firsts: slice, rest: Reals) -> Reals:
        """By first layer and end, what a stage and the best of those behind it amount to; infinite: it cannot be.

        The first of the ends is the first of the layers, the last the last that any of them reaches.
        """
        x, y = self.x[stage], self.y[stage, firsts, None]
        within = np.flatnonzero(x <= self.cap + y.max())
        ends = np.arange(firsts.start, within.max(initial=firsts.start) + 1)
        spans = x[ends] - y
        amounts: Reals = np.maximum(spans, rest[ends])
        if self.mean is not None:
            amounts = (spans - self.mean) ** 2 + rest[ends]
        too_big = self.held[ends] > self.limits[stage] + self.free[stage, firsts, None]
        empty = ends <= np.arange(len(x))[firsts, None]
        amounts[(spans > self.cap) | too_big | empty] = math.inf
        return amounts


def _search(chain: Chain) -> _Search:
    """Spans are in ticks, lest their squares be too large or too small."""
    if not any(chain.costs + chain.transfers):
        chain = replace(chain, costs=(1.0,) * len(chain.costs))
    scale = _TICKS - math.frexp(chain.longest)[1]
    before = np.cumsum([0, *np.rint(np.ldexp(chain.costs, scale))]) / np.array(chain.speeds)[:, None]
    moved = np.ldexp([0, *chain.transfers, 0], scale)
    held = np.cumsum([0, *chain.held])
    mean = sum(chain.costs) / sum(chain.speeds)
    # layers in turn, until each has its share
    dealt = mean + max(chain.costs) / min(chain.speeds) + 2 * max((0, *chain.transfers))
    return _Search(
        x=before + moved,
        y=before - moved,
        held=held,
        free=held - np.outer(chain.in_flight, [*chain.boundary, 0]),
        limits=chain.limits,
        dealt=math.ldexp(dealt * (1 + TOLERANCE), scale) if min(chain.limits) == math.inf else math.inf,
        mean=math.ldexp(mean, scale),
    )


def _why_nothing_fits(chain: Chain) -> str:
    """Names the layers that no device holds, or else the cuts that need the least enlargement of all devices."""
    limits, most = chain.limits, max(chain.limits)
    if big := [f"layer {at} needs {held:,.15g} bytes" for at, held in enumerate(chain.held) if held > most]:
        return f"{', '.join(big)}, the largest device holds {most:,.15g}: divide the layer, or take a larger device"

    search, each = _search(chain), np.array(limits)[:, None]
    unlimited = replace(
        search, x=search.held / each, y=search.free / each, limits=(math.inf,) * len(limits), mean=None
    )
    layers = unlimited.best()
    assert layers is not None  # without limits all cuts fit
    nearest = Partition(layers, chain)
    ratios = [held / limit for held, limit in zip(nearest.bytes, limits, strict=True)]
    worst = ratios.index(max(ratios))
    first, end = nearest.bounds[worst]
    return (
        f"no cuts into {len(limits)} stages fit in memory. The nearest need {ratios[worst]:.4g} times the limits: "
        f"stage {worst} with layers {first} to {end - 1} needs {nearest.bytes[worst]:,.15g} bytes of "
        f"{limits[worst]:,.15g}. Take larger devices, more stages, smaller micro-batches or fewer in flight"
    )
