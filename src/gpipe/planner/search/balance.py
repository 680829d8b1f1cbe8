"""Finds the split points that balance the stages best: least variance, or fastest slowest stage.

Both searches are exact. The cost of a stage with the layers a to b-1 is its span, `x[b] - y[a]`:

- `x[b]` is the cost of the layers before b at the speed of the stage, plus the transfer at the end of the stage.
- `y[a]` is the cost of the layers before a, minus the transfer at the beginning of the stage.

Dynamic programming goes from the last stage to the first. `least[k, a]` is the best value for the stages k, k+1, ..
with the layers from a on. This value is the minimum over all ends b of stage k of

- `(x[b] - y[a] - mean)**2 + least[k+1, b]` for `"variance"`,
- `max(x[b] - y[a], least[k+1, b])` for `"minmax"`. Then a second search finds the solution with the least variance,
  in which no stage is slower than the optimum.

Costs are counted in ticks, 2^-51 of an upper bound on the longest stage. So sums are exact, and stages with the same
cost compare as equal. Solutions within 1e-12 of the best tie, relative to the mean (for variance, relative to the
root mean square deviation). If solutions tie, the solution whose earlier stages have more layers is chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from gpipe.schedule.partition import TOLERANCE, Balance, LayerCosts, Memory, Partition, checked_layer_costs

Reals: TypeAlias = npt.NDArray[np.float64]

_TICKS = 51
_FIRSTS_AT_ONCE = 64  # first layers that are processed together; their arrays fit in the cache of a core


def partition(
    costs: Sequence[float],
    stages: int,
    *,
    balance: Balance = "variance",
    speeds: Sequence[float] | None = None,
    transfers: Sequence[float] | None = None,
    memory: Memory | None = None,
) -> Partition:
    """Returns the best partition of layers into stages (paper, section 2.1).

    Args:
        costs: The cost of each layer, in seconds at speed 1 or in any other unit. If all are 0, layers are equal.
        stages: The number of stages, at most one per layer.
        balance: The objective, for the cost t_k of each stage k:

            - `"variance"` (default): the sum of (t_k - mean)^2, with mean = sum of costs / sum of speeds.
            - `"minmax"`: the maximum of t_k. If maxima are equal, the variance decides.

            If partitions tie, the partition whose earlier stages have more layers is returned.
        speeds: The speed of the device of each stage. Default: 1.
        transfers: The time that each of the two stages next to a split point spends on the transfer, in the unit of
            the costs. The first entry is for a split after layer 0. Default: 0.
        memory: The memory of layers and devices. No stage exceeds its limit. Default: unlimited.

    Returns:
        The partition. `layers` contains the number of layers of each stage, and `seconds` contains the cost of each
        stage.

    Raises:
        ValueError: If arguments are invalid, or if no partition fits in memory. The message lists all errors, or
            describes the partition that is closest to fitting.

    >>> partition([1, 1, 1, 1, 4, 4], 3).layers
    (4, 1, 1)
    >>> partition([5] * 6, 2, speeds=[2, 1]).seconds
    (10.0, 10.0)
    >>> memory = Memory(state=[4, 4, 1, 1], boundary=[1, 1, 1, 1], activations=[2, 2, 2, 2], limits=14)
    >>> partition([1, 1, 3, 1], 2, memory=memory).bytes
    (13.0, 7.0)
    """
    choices = get_args(Balance)
    mistakes = [] if balance in choices else [f"balance={balance!r} is unknown. Use one of {choices}."]
    layer_costs = checked_layer_costs(costs, stages, speeds, transfers, memory, mistakes)
    search = _search(layer_costs)
    if balance == "minmax":
        slowest = replace(search, mean=None, cap=search.greedy)
        search = replace(search, cap=slowest.tied(slowest.least()[0, 0]))
    sizes = search.best()
    if sizes is None:
        raise ValueError(_explain_no_fit(layer_costs))
    return Partition(sizes, layer_costs)


@dataclass(frozen=True)
class _Search:
    """A search over all partitions for the least variance, or if `mean` is None for the least maximum span.

    Attributes:
        x: `x[k, b]` of the module's docstring.
        y: `y[k, a]` of the module's docstring.
        held: Stage k with the layers a to b-1 needs `held[b] - free[k, a]` bytes.
        free: See `held`.
        limits: The bytes that the device of each stage can hold.
        greedy: An upper bound on the least maximum span; infinity if memory is limited.
        mean: The mean cost of a stage.
        cap: The largest span that is allowed. Default: unlimited.
    """

    x: Reals
    y: Reals
    held: Reals
    free: Reals
    limits: tuple[float, ...]
    greedy: float
    mean: float | None
    cap: float = math.inf

    def least(self) -> Reals:
        """Returns the values `least[k, a]` of the module's docstring."""
        stages, ends = self.x.shape
        least = np.full((stages + 1, ends), math.inf)
        least[stages, -1] = 0
        for stage in reversed(range(stages)):
            for first in range(stage, ends - stages + stage, _FIRSTS_AT_ONCE):
                firsts = slice(first, first + _FIRSTS_AT_ONCE)
                least[stage, firsts] = self._values(stage, firsts, least[stage + 1]).min(axis=1, initial=math.inf)
        return least

    def best(self) -> tuple[int, ...] | None:
        """Returns the number of layers of each stage, after resolving ties; None if no partition fits."""
        least = self.least()
        if least[0, 0] == math.inf:
            return None
        allowed, spent, ends = self.tied(least[0, 0]), 0.0, [0]
        for stage, rest in enumerate(least[1:]):
            first = ends[-1]
            values = spent + self._values(stage, slice(first, first + 1), rest)[0]
            end = first + int(np.flatnonzero(values <= max(allowed, values.min()))[-1])
            if self.mean is not None:
                spent += (self.x[stage, end] - self.y[stage, first] - self.mean) ** 2
            ends.append(end)
        return tuple(np.diff(ends).tolist())

    def tied(self, best: float) -> float:
        """Returns the largest value that ties with `best`."""
        if self.mean is None:
            return best * (1 + TOLERANCE)
        return (math.sqrt(best) * (1 + TOLERANCE) + self.mean * TOLERANCE) ** 2

    def _values(self, stage: int, firsts: slice, rest: Reals) -> Reals:
        """Returns the value of a stage plus the best later stages, for each first layer (row) and end (column).

        Impossible combinations are infinite. Ends start at the first of `firsts`, and go up to the last possible one.
        """
        x, y = self.x[stage], self.y[stage, firsts, None]
        within = np.flatnonzero(x <= self.cap + y.max())
        ends = np.arange(firsts.start, within.max(initial=firsts.start) + 1)
        spans = x[ends] - y
        values: Reals = np.maximum(spans, rest[ends])
        if self.mean is not None:
            values = (spans - self.mean) ** 2 + rest[ends]
        too_big = self.held[ends] > self.limits[stage] + self.free[stage, firsts, None]
        empty = ends <= np.arange(len(x))[firsts, None]
        values[(spans > self.cap) | too_big | empty] = math.inf
        return values


def _search(costs: LayerCosts) -> _Search:
    """Returns the search for these costs. Rounds times to whole ticks, whose squares do not overflow."""
    if not any(costs.costs + costs.transfers):
        costs = replace(costs, costs=(1.0,) * len(costs.costs))
    scale = _TICKS - math.frexp(costs.longest)[1]
    before = np.cumsum([0, *np.rint(np.ldexp(costs.costs, scale))]) / np.array(costs.speeds)[:, None]
    transfers = np.ldexp([0, *costs.transfers, 0], scale)
    held = np.cumsum([0, *costs.held])
    mean = sum(costs.costs) / sum(costs.speeds)
    # An upper bound of the slowest stage: if each stage takes layers until it reaches the mean, the stage exceeds the
    # mean by at most one layer and two transfers.
    greedy = mean + max(costs.costs) / min(costs.speeds) + 2 * max((0, *costs.transfers))
    return _Search(
        x=before + transfers,
        y=before - transfers,
        held=held,
        free=held - np.outer(costs.in_flight, [*costs.boundary, 0]),
        limits=costs.limits,
        greedy=math.ldexp(greedy * (1 + TOLERANCE), scale) if min(costs.limits) == math.inf else math.inf,
        mean=math.ldexp(mean, scale),
    )


def _explain_no_fit(costs: LayerCosts) -> str:
    """Returns an error message that names the layers that are too big, or the partition closest to fitting."""
    limits, most = costs.limits, max(costs.limits)
    if big := [f"layer {layer} needs {held:,.15g} bytes" for layer, held in enumerate(costs.held) if held > most]:
        return (
            f"memory: {', '.join(big)}, but the largest device holds {most:,.15g}. Divide the layer, or use a larger "
            "device. [layer-too-large]"
        )
    search, divisor = _search(costs), np.array(limits)[:, None]
    unlimited = replace(
        search, x=search.held / divisor, y=search.free / divisor, limits=(math.inf,) * len(limits), mean=None
    )
    sizes = unlimited.best()
    assert sizes is not None  # Every partition fits without limits.
    nearest = Partition(sizes, costs)
    ratios = [held / limit for held, limit in zip(nearest.bytes, limits, strict=True)]
    worst = ratios.index(max(ratios))
    first, end = nearest.bounds[worst]
    return (
        f"memory: no partition into {len(limits)} stages fits. In the closest partition, stage {worst} (layers "
        f"{first} to {end - 1}) needs {nearest.bytes[worst]:,.15g} bytes, {ratios[worst]:.4g} times the limit of "
        f"{limits[worst]:,.15g}. Use larger devices, more stages, or smaller micro-batches. [nothing-fits]"
    )
