"""Cuts a row of layers into stages: least variance of the stages' costs (the paper), or least slowest stage.

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
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Balance = Literal["variance", "minmax"]
Reals = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
Edges = tuple[Reals, Reals]

_TIE = 1e-12
_TICKS = 51
_NO_SQUARE = 1e-150  # where the longest possible stage is 1, squares of deviations below this are lost
_ROWS_AT_ONCE, _PAIRS_AT_ONCE = 64, 1 << 15  # a scan works in pieces that fit a core's cache


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
    """

    state: Sequence[float]
    boundary: Sequence[float]
    inside: Sequence[float]
    limits: float | Sequence[float]
    in_flight: float | Sequence[float] = 1


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
        ends = np.cumsum(self.layers).tolist()
        return tuple(zip([0, *ends], ends, strict=False))

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first layer of each stage but the first."""
        return tuple(first for first, _ in self.bounds[1:])

    @property
    def seconds(self) -> tuple[float, ...]:
        """What each stage costs: its layers over its speed, and the transfers at its ends; unit of the costs."""
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
        """What the slowest stage costs at least: the mean, or the biggest layer on the fastest device."""
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
        slowest = max(self.seconds) * (1 - _TIE)
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
    search = _search(chain)
    if balance == "minmax":
        slowest = replace(search, mean=None)
        search = slowest.below(_least(slowest)[0, 0], mean=search.mean)
    least = _least(search)
    if least[0, 0] == math.inf:
        raise ValueError(_why_nothing_fits(chain))
    return Partition(_walk(search, least), chain)


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

    def spans(stage: int) -> Edges:
        x, y = search.bytes(stage)
        return x / limits[stage], y / limits[stage]

    search = replace(_search(chain), spans=spans, limits=_each(math.inf, len(limits)), mean=None)
    nearest = Partition(_walk(search, _least(search)), chain)
    ratios = [held / limit for held, limit in zip(nearest.bytes, limits, strict=True)]
    worst = ratios.index(max(ratios))
    first, end = nearest.bounds[worst]
    return (
        f"no cuts into {len(limits)} stages fit in memory. The nearest need {ratios[worst]:.4g} times the limits: "
        f"stage {worst} with layers {first} to {end - 1} needs {nearest.bytes[worst]:,.15g} bytes of "
        f"{limits[worst]:,.15g}. Take larger devices, more stages, smaller micro-batches or fewer in flight"
    )


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
    mean: float | None = None
    cap: float = math.inf

    def join(self, span: Reals, rest: Reals) -> Reals:
        """What a stage and the best of the stages behind it amount to."""
        return np.maximum(span, rest) if self.mean is None else (span - self.mean) ** 2 + rest

    def tied(self, best: float) -> float:
        """The largest amount that still ties with the best."""
        if self.mean is None:
            return best * (1 + _TIE)
        return (math.sqrt(best) * (1 + _TIE) + self.mean * _TIE + _NO_SQUARE) ** 2

    def below(self, best: float, mean: float | None) -> "_Search":
        """A search for what `mean` says, without spans that are longer than any in an answer as good as `best`."""
        longest = self.tied(best) if self.mean is None else self.mean + math.sqrt(self.tied(best))
        return replace(self, cap=min(self.cap, longest), mean=mean)


def _search(chain: Chain) -> _Search:
    """Spans are seconds, scaled by a power of two lest their squares be too large or too small."""
    if not any(chain.costs + chain.transfers):
        chain = replace(chain, costs=_each(1, len(chain.costs)))
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
    return _Search(len(chain.costs), chain.limits, spans, bytes_, mean)


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
    first: Places
    last: Places
    cap: float

    @property
    def in_order(self) -> bool:
        """Whether halving is exact."""
        return all(bool(np.all(edge[1:] >= edge[:-1])) for edge in (self.x, self.y, self.last))

    def amounts(self, rows: Places, columns: Places) -> Reals:
        """What each of these pairs amounts to, infinite if it cannot be."""
        span = self.x[columns] - self.y[rows]
        amounts = self.search.join(span, self.rest[columns])
        amounts[(columns < self.first[rows]) | (columns > self.last[rows]) | (span > self.cap)] = math.inf
        return amounts

    def halve(self) -> Reals:
        """The least of each row, if the column where it is moves right from row to row."""
        count = len(self.y)
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

    def _least_between(self, rows: Places, low: Places, high: Places) -> tuple[Reals, Places]:
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


def _rows(search: _Search, stage: int, starts: Places, rest: Reals) -> tuple[Places, _Rows]:
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


def _walk(search: _Search, least: Reals) -> tuple[int, ...]:
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
