"""Finds how many consecutive layers each stage takes, so that stages vary least, or the slowest is fastest.

Both are exact. A stage of the layers a to b-1 spans `x[b] - y[a]`: x is what the layers before b cost at the stage's
speed plus the transfer at its end, y the same before a minus the transfer at its beginning. From the last stage
back, `least[k, a]` is the best that stages k, k+1, .. make of the layers from a on: over all next cuts b, the least
of (x[b] - y[a] - mean)^2 + least[k+1, b] (variance) or of max(x[b] - y[a], least[k+1, b]) (min-max). Of the answers
to min-max, the one of least variance is taken: the same search among stages no slower than the optimum.

No stage of the best answer spans more than any answer lets it, so layers dealt out in turn bound how far a stage may
reach, and the pairs of a and b that are looked at are few.

Costs are counted in ticks, 2^-51 of their total, so that sums are exact and stages alike are equal to the last bit.
Answers within 1e-12 of the best, relative to the mean, tie (variance: in root-mean-square deviation). Of these, the
first stage takes as many layers as it can, then the second, and so on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from gpipe.schedule.partition import TOLERANCE, Balance, Chain, Memory, Partition, checked_chain

Reals: TypeAlias = npt.NDArray[np.float64]
Edges: TypeAlias = tuple[Reals, Reals]

_TICKS = 51
_NO_SQUARE = 1e-150  # where the longest possible stage is 1, squares of deviations below this are lost
_FEW, _PAIRS_AT_ONCE = 64, 1 << 16  # beginnings of a stage, and pairs of beginning and end, as fit in a core's cache


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
    layers = search.best() if balance == "variance" else search.least_slowest()
    if layers is None:
        raise ValueError(_why_nothing_fits(chain))
    return Partition(layers, chain)


@dataclass(frozen=True)
class _Search:
    """What to minimize over all cuts: the variance of the stages' spans around `mean`, or without, the longest span.

    The span of layers a to b-1 as stage k is x[b] - y[a] of `spans(k)`, and what they hold x[b] - y[a] of `bytes(k)`.
    Spans above `cap` are out, and stages that hold more than their `limits`.
    """

    layers: int
    limits: tuple[float, ...]
    spans: Callable[[int], Edges]
    bytes: Callable[[int], Edges]
    mean: float | None
    cap: float = math.inf

    def best(self) -> tuple[int, ...] | None:
        """The layers of each stage; None if nothing fits."""
        least = self._least()
        return None if least[0, 0] == math.inf else self._walk(least)

    def least_slowest(self) -> tuple[int, ...] | None:
        """Those whose longest span is shortest, of these those of least variance; None if nothing fits."""
        slowest = replace(self, mean=None)
        longest = slowest._least()[0, 0]
        return None if longest == math.inf else replace(self, cap=slowest._tied(longest)).best()

    def dealt(self, before: Reals, speeds: Sequence[float]) -> "_Search":
        """The same search, without spans that are too long for an answer as good as that of dealing layers out.

        Each stage takes some in turn until it has its share of what the layers cost together, if memory allows that.
        """
        count = len(speeds)
        shares = np.cumsum(speeds)[:-1] / sum(speeds) * before[-1]
        ends = np.clip(np.searchsorted(before, shares), range(1, count), range(self.layers - count + 1, self.layers))
        stages = np.arange(count - 1)
        cuts = [0, *(np.maximum.accumulate(ends - stages) + stages).tolist(), self.layers]
        amount = longest = 0.0
        for stage, (first, end) in enumerate(pairwise(cuts)):
            (x, y), (held, free) = self.spans(stage), self.bytes(stage)
            if held[end] - free[first] > self.limits[stage]:
                return self
            longest = max(longest, x[end] - y[first])
            amount += 0.0 if self.mean is None else (x[end] - y[first] - self.mean) ** 2
        if self.mean is not None:
            longest = max(longest, self.mean + math.sqrt(self._tied(amount)))
        return replace(self, cap=longest * (1 + TOLERANCE))

    def _least(self) -> Reals:
        """The table `least[k, a]` of the module's docstring."""
        stages, layers = len(self.limits), self.layers
        least = np.full((stages + 1, layers + 1), math.inf)
        least[stages, layers] = 0
        for stage in reversed(range(stages)):
            starts = range(stage, layers - stages + stage + 1) if stage else range(1)
            last = layers if stage + 1 == stages else layers - stages + stage + 1
            reach = self._reach(stage)
            begin = starts.start
            while begin < starts.stop:
                width = max(_FEW, int(reach[begin]) - begin)
                end = min(starts.stop, begin + max(1, min(width, _PAIRS_AT_ONCE // width)))
                columns = slice(begin + 1, min(last, int(reach[begin:end].max())) + 1)
                amounts = self._amounts(stage, slice(begin, end), columns, least[stage + 1])
                least[stage, begin:end] = amounts.min(axis=1, initial=math.inf)
                begin = end
        return least

    def _reach(self, stage: int) -> npt.NDArray[np.intp]:
        """By where a stage begins, the last place where it can end for its span; where x falls, more do not."""
        x, y = self.spans(stage)
        floor = np.minimum.accumulate(x[::-1])[::-1]  # the least x from each end on
        return np.searchsorted(floor, self.cap + y, "right") - 1

    def _amounts(self, stage: int, rows: slice, columns: slice, rest: Reals) -> Reals:
        """What a stage and the best of the stages behind it amount to; infinite if that cannot be."""
        (x, y), (held, free) = self.spans(stage), self.bytes(stage)
        span = x[None, columns] - y[rows, None]
        amounts = (
            np.maximum(span, rest[None, columns])
            if self.mean is None
            else (span - self.mean) ** 2 + rest[None, columns]
        )
        too_big = held[None, columns] > self.limits[stage] + free[rows, None]
        empty = np.arange(columns.start, columns.stop)[None, :] <= np.arange(rows.start, rows.stop)[:, None]
        amounts[(span > self.cap) | too_big | empty] = math.inf
        return amounts

    def _walk(self, least: Reals) -> tuple[int, ...]:
        """The best answer from its table: each cut as far right as a tie allows."""
        allowed, spent, cuts = self._tied(least[0, 0]), 0.0, [0]
        for stage, behind in enumerate(least[1:]):
            first = cuts[-1]
            columns = slice(first + 1, self.layers + 1)
            amounts = spent + self._amounts(stage, slice(first, first + 1), columns, behind)[0]
            end = int(np.flatnonzero(amounts <= max(allowed, amounts.min()))[-1]) + first + 1
            if self.mean is not None:
                x, y = self.spans(stage)
                spent += (x[end] - y[first] - self.mean) ** 2
            cuts.append(end)
        return tuple(np.diff(cuts).tolist())

    def _tied(self, best: float) -> float:
        """The largest amount that still ties with the best."""
        if self.mean is None:
            return best * (1 + TOLERANCE)
        return (math.sqrt(best) * (1 + TOLERANCE) + self.mean * TOLERANCE + _NO_SQUARE) ** 2


def _search(chain: Chain) -> _Search:
    """Spans are seconds, scaled by a power of two lest their squares be too large or too small."""
    if not any(chain.costs + chain.transfers):
        chain = replace(chain, costs=(1.0,) * len(chain.costs))
    tick, scale = math.frexp(sum(chain.costs))[1] - _TICKS, -math.frexp(chain.longest)[1]
    before = np.ldexp(np.cumsum([0, *np.rint(np.ldexp(chain.costs, -tick))]), tick)
    moved = np.array([0, *chain.transfers, 0])
    held, boundary = np.cumsum([0, *chain.held]), np.array([*chain.boundary, 0])

    def spans(stage: int) -> Edges:
        own = before / chain.speeds[stage]
        return np.ldexp(own + moved, scale), np.ldexp(own - moved, scale)

    def bytes_(stage: int) -> Edges:
        return held, held - chain.in_flight[stage] * boundary

    mean = math.ldexp(sum(chain.costs) / sum(chain.speeds), scale)
    return _Search(len(chain.costs), chain.limits, spans, bytes_, mean).dealt(before, chain.speeds)


def _why_nothing_fits(chain: Chain) -> str:
    """Names the layers that no device holds, or else the cuts that need the least enlargement of all devices."""
    limits, most = chain.limits, max(chain.limits)
    if big := [f"layer {at} needs {held:,.15g} bytes" for at, held in enumerate(chain.held) if held > most]:
        return f"{', '.join(big)}, the largest device holds {most:,.15g}: divide the layer, or take a larger device"

    nearest = Partition(_least_excess(chain), chain)
    ratios = [held / limit for held, limit in zip(nearest.bytes, limits, strict=True)]
    worst = ratios.index(max(ratios))
    first, end = nearest.bounds[worst]
    return (
        f"no cuts into {len(limits)} stages fit in memory. The nearest need {ratios[worst]:.4g} times the limits: "
        f"stage {worst} with layers {first} to {end - 1} needs {nearest.bytes[worst]:,.15g} bytes of "
        f"{limits[worst]:,.15g}. Take larger devices, more stages, smaller micro-batches or fewer in flight"
    )


def _least_excess(chain: Chain) -> tuple[int, ...]:
    """The cuts, whether they fit in memory or not, that need the least enlargement of all devices by one factor."""
    search, limits = _search(chain), chain.limits

    def spans(stage: int) -> Edges:
        x, y = search.bytes(stage)
        return x / limits[stage], y / limits[stage]

    unlimited = (math.inf,) * len(limits)
    found = replace(search, spans=spans, limits=unlimited, mean=None, cap=math.inf).best()
    assert found is not None  # without limits all cuts fit
    return found
