"""Distributes sequences of unequal lengths over micro-batches of equal cost."""

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from gpipe.errors import is_count

Cost = tuple[float, float, float] | Callable[[float], float]
TRANSFORMER: Cost = (0.0, 1.0, 1 / (6 * 4096))
"""The FLOPs of a Transformer 4,096 wide, in units of its matrix products per token: attention adds L / (6 width)."""


def pack(
    lengths: Iterable[float], micro_batches: int, *, cost: Cost = TRANSFORMER, padded: bool = False
) -> list[list[int]]:
    """Distributes sequences over micro-batches, so that the most expensive micro-batch is as cheap as possible.

    The result depends only on the arguments.

    Args:
        lengths: The length of each sequence, for example in tokens.
        micro_batches: M, the number of micro-batches.
        cost: The cost of a sequence of length L: three numbers (a, b, c) for a + b L + c L^2, or a function of the
            length. Default: the operations of a Transformer whose hidden size is 4,096, L + L^2 / (6 x 4,096).
        padded: Whether each micro-batch is padded to its longest sequence, and therefore costs as much as if all its
            sequences were that long. Default: False, sequences are concatenated without padding.

    Returns:
        The indices of the sequences of each micro-batch, in ascending order: M lists, or one list per sequence if
        there are fewer than M sequences. No list is empty. With `padded`, the maximum cost is minimal. Otherwise the
        better of two heuristics is returned: longest processing time first, and Karmarkar-Karp.

    Raises:
        TypeError: If `lengths` is not an iterable of numbers.
        ValueError: If `lengths` is empty, if `micro_batches` is not an integer of at least 1, if `cost` is neither a
            function nor three numbers, or if a cost is negative or not finite.

    >>> import gpipe
    >>> gpipe.pack([9, 1, 5, 4, 2, 3], micro_batches=3)
    [[0], [1, 3, 5], [2, 4]]
    >>> gpipe.pack([9, 1, 5, 4, 2, 3], micro_batches=3, padded=True)
    [[0], [1, 4, 5], [2, 3]]
    """
    try:
        lengths = [float(length) for length in lengths]
    except (TypeError, ValueError) as error:
        message = f"lengths is not an iterable of numbers: {error}. Pass lengths, such as map(len, sequences)."
        raise TypeError(message) from None
    mistakes = []
    if callable(cost):
        costs = [float(cost(length)) for length in lengths]
    else:
        try:
            a, b, c = map(float, cost)
        except (TypeError, ValueError):
            mistakes.append(f"cost={cost!r} is invalid. Pass three numbers (a, b, c), or a function.")
            a = b = c = 0.0
        costs = [a + b * length + c * length * length for length in lengths]
    if not costs:
        mistakes.append("lengths is empty. Pass the length of at least one sequence.")
    if not is_count(micro_batches):
        mistakes.append(f"micro_batches={micro_batches!r} is invalid. Pass the number of micro-batches, at least 1.")
    mistakes += [
        f"cost= of lengths[{row}]={lengths[row]:g} is {value:g}. Use costs that are finite and at least 0."
        for row, value in enumerate(costs)
        if not 0 <= value < math.inf
    ]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    parts = min(micro_batches, len(costs))
    if padded:
        return _in_order(_minimize_padded(costs, parts))

    def most_expensive(groups: Sequence[Sequence[int]]) -> float:
        return max(math.fsum(costs[row] for row in group) for group in groups)

    candidates = [_longest_first(costs, parts), _karmarkar_karp(costs, parts)]
    return _in_order(min((groups for groups in candidates if all(groups)), key=most_expensive))


def _in_order(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    return sorted(sorted(group) for group in groups)


def _longest_first(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Assigns sequences, the most expensive first, to the part with the lowest cost. No part stays empty."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, 0, part) for part in range(parts)]  # cost, number of sequences, part: a heap
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        load, count, part = loads[0]
        groups[part].append(row)
        heapreplace(loads, (load + costs[row], count + 1, part))
    return groups


def _karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Merges the two partial solutions with the largest differences, until one is left. A part may be empty.

    A partial solution has a cost and sequences for each part, the most expensive part first. A merge joins the most
    expensive part of one solution with the cheapest part of the other solution.
    """
    Solution = list[tuple[float, list[int]]]  # noqa: N806  # a type
    heap: list[tuple[float, int, Solution]] = [
        (-cost, row, [(cost, [row]), *[(0.0, list[int]())] * (parts - 1)]) for row, cost in enumerate(costs)
    ]
    heapify(heap)
    while len(heap) > 1:
        _, row, first = heappop(heap)
        _, _, second = heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        merged = sorted(((a + b, rows + more) for (a, rows), (b, more) in pairs), key=lambda part: -part[0])
        heappush(heap, (merged[-1][0] - merged[0][0], row, merged))
    return [rows for _, rows in heap[0][2]]


def _minimize_padded(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Cuts the sorted sequences into parts, so that the largest number of sequences times highest cost is minimal."""
    rows = sorted(range(len(costs)), key=lambda row: -costs[row])

    def cut(limit: float) -> list[list[int]] | None:
        """Fills each part up to the limit, the most expensive sequences first. None if sequences are left."""
        groups, first = list[list[int]](), 0
        for later in reversed(range(parts)):  # each later part needs a sequence
            highest, most = costs[rows[first]], len(rows) - later - first
            count = most if most * highest <= limit else int(limit // highest)
            groups.append(rows[first : first + count])
            first += count
        return groups if first == len(rows) else None

    low, high = costs[rows[0]], costs[rows[0]] * len(rows)
    best = cut(low) or cut(high)
    assert best is not None
    while (middle := (low + high) / 2) not in (low, high):  # until the limits are neighboring numbers
        groups = cut(middle)
        low, high, best = (low, middle, groups) if groups else (middle, high, best)
    return best
