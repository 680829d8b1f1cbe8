"""Finds how many consecutive layers each stage takes, so that stages vary least, or the slowest is fastest.

Both are exact. A stage of the layers a to b-1 lasts `x[b] - y[a]`: x is what the layers before b cost at the stage's
speed plus the transfer at its end, y the same before a minus the transfer at its beginning. From the last stage
back, `least[k, a]` is the best that stages k, k+1, .. make of the layers from a on: over all next cuts b, the least
of (x[b] - y[a] - mean)^2 + least[k+1, b] (variance) or of max(x[b] - y[a], least[k+1, b]) (min-max). Of the answers
to min-max, the one of least variance is taken: the same search among stages no slower than the optimum.

Note "Halving". Let x, y and the last b that memory allows all rise with position. Take a < a' < b < b'. Stages a..b
and a'..b' are no worse together than a..b' and a'..b, which have the same sum but are more unequal (squares are
convex, and the longest of the four is a..b'); and where a..b' fits in memory, so do a..b and a'..b'. Hence the best
b moves right as a does: that of the middle row bounds the rows on both its sides, O(L log L) for each stage. Speeds
change nothing, since a stage has one speed, and the mean is a constant.

Note "Scan". x or y falls where the transfers of neighbouring cuts differ by more than the layer between them costs,
the last b where a boundary tensor outgrows the layer before it. Halving then gives real cuts, but maybe not the
best. They bound the slowest stage of the best; a scan of all pairs within that bound is exact. That is O(L^2) for
each stage at worst, which a layer as big as all others together and very uneven transfers can bring about.

Note "Ties". Costs are counted in ticks, 2^-51 of their total, so that sums are exact and stages alike are equal to
the last bit. Answers within 1e-12 of the best, relative to the mean, tie (variance: in root-mean-square deviation).
Of these, the first stage takes as many layers as it can, then the second, and so on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

LayerCounts: TypeAlias = tuple[int, ...]
"""How many each stage takes."""

Reals: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.intp]
Edges: TypeAlias = tuple[Reals, Reals]

TOLERANCE = 1e-12  # note "Ties"
_TICKS = 51
_NO_SQUARE = 1e-150  # where the longest possible stage is 1, squares of deviations below this are lost
_ROWS_AT_ONCE, _PAIRS_AT_ONCE = 64, 1 << 15  # a scan works in pieces that fit a core's cache


@dataclass(frozen=True)
class Chain:
    """The question: layers in a row, and a device for each stage. `partition` and `given` check and build it.

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


def least_variance(chain: Chain) -> LayerCounts | None:
    """The cuts whose stages' seconds differ least from their mean; None if none fit in memory."""
    return _best(_search(chain))


def least_slowest(chain: Chain) -> LayerCounts | None:
    """The cuts whose slowest stage is fastest, of these those of least variance; None if none fit in memory."""
    search = _search(chain)
    slowest = replace(search, mean=None)
    least = _least(replace(slowest, cap=search.dealt))[0, 0]  # a few columns for each row, where that is enough
    if least == math.inf:
        least = _least(slowest)[0, 0]
    return _best(slowest.below(least, mean=search.mean))


def least_excess(chain: Chain) -> LayerCounts:
    """The cuts, whether they fit in memory or not, that need the least enlargement of all devices by one factor."""
    search, limits = _search(chain), chain.limits

    def spans(stage: int) -> Edges:
        x, y = search.bytes(stage)
        return x / limits[stage], y / limits[stage]

    found = _best(replace(search, spans=spans, limits=(math.inf,) * len(limits), mean=None))
    assert found is not None  # without limits all cuts fit
    return found


@dataclass(frozen=True)
class _Search:
    """What to minimize over all cuts: the variance of the stages' spans around `mean`, or without, the longest span.

    The span of layers a to b-1 as stage k is x[b] - y[a] of `spans(k)`, and what they hold x[b] - y[a] of `bytes(k)`.
    Spans above `cap` are out, and stages that hold more than their `limits`. None is longer than `dealt` where layers
    are dealt out in turn, each stage taking some until it has its share, if memory allows that.
    """

    layers: int
    limits: tuple[float, ...]
    spans: Callable[[int], Edges]
    bytes: Callable[[int], Edges]
    dealt: float = math.inf
    mean: float | None = None
    cap: float = math.inf

    def join(self, span: Reals, rest: Reals) -> Reals:
        """What a stage and the best of the stages behind it amount to."""
        return np.maximum(span, rest) if self.mean is None else (span - self.mean) ** 2 + rest

    def tied(self, best: float) -> float:
        """The largest amount that still ties with the best."""
        if self.mean is None:
            return best * (1 + TOLERANCE)
        return (math.sqrt(best) * (1 + TOLERANCE) + self.mean * TOLERANCE + _NO_SQUARE) ** 2

    def below(self, best: float, mean: float | None) -> "_Search":
        """A search for what `mean` says, without spans that are longer than any in an answer as good as `best`."""
        longest = self.tied(best) if self.mean is None else self.mean + math.sqrt(self.tied(best))
        return replace(self, cap=min(self.cap, longest), mean=mean)


def _search(chain: Chain) -> _Search:
    """Spans are seconds, scaled by a power of two lest their squares be too large or too small."""
    if not any(chain.costs + chain.transfers):
        chain = replace(chain, costs=(1.0,) * len(chain.costs))
    tick, scale = math.frexp(sum(chain.costs))[1] - _TICKS, -math.frexp(chain.longest)[1]
    before = np.ldexp(np.cumsum([0, *np.rint(np.ldexp(chain.costs, -tick))]), tick)
    moved, boundary = np.array([0, *chain.transfers, 0]), np.array([*chain.boundary, 0])
    held = np.cumsum([0, *chain.held])

    def spans(stage: int) -> Edges:
        own = before / chain.speeds[stage]
        return np.ldexp(own + moved, scale), np.ldexp(own - moved, scale)

    def bytes_(stage: int) -> Edges:
        return held, held - chain.in_flight[stage] * boundary

    mean = math.ldexp(sum(chain.costs) / sum(chain.speeds), scale)
    last_taken = max(chain.costs) / min(chain.speeds) + 2 * max(chain.transfers, default=0)
    return _Search(len(chain.costs), chain.limits, spans, bytes_, mean + math.ldexp(last_taken, scale), mean)


@dataclass(frozen=True)
class _Rows:
    """One stage: a row for each layer it may begin at, a column for each place it may end at.

    `rest` is the best behind each column. A row may end in the columns from `first` to `last`, as far as memory and
    the cap go; if x is not rising, some spans in between are above the cap.
    """

    search: _Search
    x: Reals
    y: Reals
    rest: Reals
    first: Indices
    last: Indices
    cap: float

    @property
    def in_order(self) -> bool:
        """Whether halving is exact."""
        return all(bool(np.all(edge[1:] >= edge[:-1])) for edge in (self.x, self.y, self.last))

    def amounts(self, rows: Indices, columns: Indices) -> Reals:
        """What each of these pairs amounts to, infinite if it cannot be."""
        span = self.x[columns] - self.y[rows]
        amounts = self.search.join(span, self.rest[columns])
        amounts[(columns < self.first[rows]) | (columns > self.last[rows]) | (span > self.cap)] = math.inf
        return amounts

    def halve(self) -> Reals:
        """The least of each row, if the column where it is moves right from row to row."""
        count = len(self.y)
        if (self.last - self.first + 1).sum() <= _PAIRS_AT_ONCE:  # all are had sooner than many numpy calls are made
            return self._least_between(np.arange(count), self.first, self.last)[0]
        least = np.empty(count)
        where = np.zeros(count + 2, np.intp)  # the column of a row's least is where[row + 1]
        where[-1] = len(self.x) - 1
        step = 1 << count.bit_length() - 1
        while step:
            after = np.arange(step, count + 1, 2 * step)
            rows = after - 1
            low = np.maximum(where[after - step], self.first[rows])
            high = np.minimum(where[np.minimum(after + step, count + 1)], self.last[rows])
            least[rows], where[after] = self._least_between(rows, low, np.maximum(low, high))
            step //= 2
        return least

    def _least_between(self, rows: Indices, low: Indices, high: Indices) -> tuple[Reals, Indices]:
        """The least of each row from column `low` to `high`, and the first column where it is."""
        counts = high - low + 1
        begins = np.cumsum(counts) - counts
        columns = np.arange(counts.sum()) + np.repeat(low - begins, counts)
        amounts = self.amounts(np.repeat(rows, counts), columns)
        least = np.minimum.reduceat(amounts, begins)
        found = np.flatnonzero(amounts == np.repeat(least, counts))
        return least, columns[found[np.searchsorted(found, begins)]]

    def scan(self) -> Reals:
        """The least of each row."""
        count, least = len(self.y), np.empty(len(self.y))
        widest = int((self.last - self.first).max()) + _ROWS_AT_ONCE
        for begin in range(0, count, step := max(1, min(_ROWS_AT_ONCE, _PAIRS_AT_ONCE // widest))):
            rows = np.arange(begin, min(begin + step, count))
            columns = np.arange(self.first[begin], self.last[rows].max() + 1)
            least[rows] = self.amounts(rows[:, None], columns[None, :]).min(axis=1)
        return least


def _best(search: _Search) -> LayerCounts | None:
    least = _least(search)
    return None if least[0, 0] == math.inf else _walk(search, least)


def _least(search: _Search) -> Reals:
    """The table `least[k, a]` of the module's docstring."""
    least, exact = _table(search, _Rows.halve)
    if exact:
        return least
    return _table(search.below(least[0, 0], search.mean), _Rows.scan)[0]


def _table(search: _Search, out_of_order: Callable[[_Rows], Reals]) -> tuple[Reals, bool]:
    stages, layers = len(search.limits), search.layers
    least, exact = np.full((stages + 1, layers + 1), math.inf), True
    least[stages, layers] = 0
    for stage in reversed(range(stages)):
        starts = np.arange(stage, layers - stages + stage + 1 if stage else 1)
        starts, rows = _rows(search, stage, starts, least[stage + 1])
        if not starts.size:
            break
        least[stage, starts] = rows.halve() if rows.in_order else out_of_order(rows)
        exact = exact and rows.in_order
    return least, exact


def _rows(search: _Search, stage: int, starts: Indices, rest: Reals) -> tuple[Indices, _Rows]:
    """The rows of those `starts` from which the stage can end somewhere, and which starts these are."""
    ends = np.flatnonzero(rest < math.inf)
    x, y = search.spans(stage)
    held, free = search.bytes(stage)
    x, y, held, free = x[ends], y[starts], held[ends], free[starts]
    floor = np.minimum.accumulate(x[::-1])[::-1]  # the least x from each end on
    in_time = np.searchsorted(floor, search.cap + y, "right")
    in_memory = np.searchsorted(held, search.limits[stage] + free, "right")
    first, last = np.searchsorted(ends, starts, "right"), np.minimum(in_time, in_memory) - 1
    can = first <= last
    cap = math.inf if np.array_equal(x, floor) else search.cap
    return starts[can], _Rows(search, x, y[can], rest[ends], first[can], last[can], cap)


def _walk(search: _Search, least: Reals) -> LayerCounts:
    """The best answer from its table: each cut as far right as a tie allows."""
    allowed, spent, cuts = search.tied(least[0, 0]), 0.0, [0]
    for stage in range(len(search.limits)):
        ends = np.flatnonzero(least[stage + 1] < math.inf)
        _, row = _rows(search, stage, np.array(cuts[-1:]), least[stage + 1])
        amounts = spent + row.amounts(np.array([0]), np.arange(len(ends)))
        at = np.flatnonzero(amounts <= max(allowed, amounts.min()))[-1]
        cuts.append(int(ends[at]))
        if search.mean is not None:
            spent += (row.x[at] - row.y[0] - search.mean) ** 2
    return tuple(np.diff(cuts).tolist())
