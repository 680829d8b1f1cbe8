"""Sequences of unequal lengths are distributed over micro-batches of equal cost."""

import random
import re
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipe

LAW = settings(derandomize=True, deadline=None, database=None, max_examples=200)
LINEAR = (0.0, 1.0, 0.0)
LENGTHS = st.lists(st.integers(0, 5000) | st.floats(0, 1e6), min_size=1, max_size=40)


def costs_of(groups: Sequence[Sequence[int]], lengths: Sequence[float], *, padded: bool) -> list[float]:
    if padded:
        return [len(group) * max(lengths[row] for row in group) for group in groups]
    return [sum(lengths[row] for row in group) for group in groups]


def least_maximum(lengths: Sequence[float], parts: int, *, padded: bool) -> float:
    """Tries all ways to pack."""
    found = []
    for assigned in product(range(parts), repeat=len(lengths)):
        groups = [[row for row, part in enumerate(assigned) if part == number] for number in range(parts)]
        if all(groups):
            found.append(max(costs_of(groups, lengths, padded=padded)))
    return min(found)


@LAW
@given(LENGTHS, st.integers(1, 50), st.booleans())
def test_every_sequence_is_in_one_micro_batch_and_none_is_empty(lengths: list[float], m: int, padded: bool) -> None:
    groups = gpipe.pack(lengths, m, padded=padded)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert len(groups) == min(m, len(lengths))
    assert all(group == sorted(group) and group for group in groups)
    assert groups == sorted(groups)
    assert groups == gpipe.pack(iter(lengths), m, padded=padded)


@LAW
@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_padded_micro_batches_are_optimal_and_others_within_the_bound_of_longest_first(
    lengths: list[int], m: int
) -> None:
    m = min(m, len(lengths))
    padded = gpipe.pack(lengths, m, cost=LINEAR, padded=True)
    assert max(costs_of(padded, lengths, padded=True)) == least_maximum(lengths, m, padded=True)
    groups = gpipe.pack(lengths, m, cost=LINEAR)
    bound = 4 / 3 - 1 / (3 * m)  # Graham (1969)
    assert max(costs_of(groups, lengths, padded=False)) <= bound * least_maximum(lengths, m, padded=False) + 1e-9


def test_many_sequences_cost_the_same_in_all_micro_batches() -> None:
    for seed in range(5):
        chance = random.Random(seed)
        lengths = [min(4096, max(64, round(512 * chance.lognormvariate(0, 1)))) for _ in range(128)]
        each = [a + a * a / 24576 for a in lengths]
        costs = costs_of(gpipe.pack(lengths, 8), each, padded=False)
        assert max(costs) < 1.001 * sum(costs) / 8
        arrival = [range(first, first + 16) for first in range(0, 128, 16)]
        assert max(costs_of(arrival, each, padded=False)) > 1.2 * sum(costs) / 8


@pytest.mark.parametrize(
    ("lengths", "parts", "best"),
    [
        ([8, 7, 6, 5, 4], 2, 16),  # longest first: 17
        ([9, 7, 2, 3, 5, 7, 7, 4], 3, 15),  # Karmarkar-Karp: 16
    ],
)
def test_the_better_of_both_heuristics_is_returned(lengths: list[int], parts: int, best: int) -> None:
    assert max(costs_of(gpipe.pack(lengths, parts, cost=LINEAR), lengths, padded=False)) == best


def test_the_cost_decides() -> None:
    lengths = torch.tensor([4, 3, 3, 2])
    assert gpipe.pack(lengths, 2, cost=LINEAR) == [[0, 3], [1, 2]]
    assert gpipe.pack(lengths, 2, cost=(0.0, 0.0, 1.0)) == [[0, 3], [1, 2]]
    assert gpipe.pack([4, 2, 2], 2, cost=lambda length: float(length == 2)) == [[0, 1], [2]]
    assert gpipe.pack([9, 1, 1, 1], 2, cost=(100.0, 1.0, 0.0)) == [[0, 3], [1, 2]]
    assert gpipe.pack([9, 1, 1, 1], 2, cost=LINEAR) == [[0], [1, 2, 3]]


def test_wrong_arguments_are_rejected_together() -> None:
    with pytest.raises(ValueError, match=r"lengths is empty.*\nmicro_batches=0 is invalid"):
        gpipe.pack([], 0)
    for cost in ((1, 2), 5, None, "abc"):
        message = rf"cost={re.escape(repr(cost))} is invalid. Pass three numbers.*\nmicro_batches=2.5 is invalid"
        with pytest.raises(ValueError, match=message):
            gpipe.pack([3], 2.5, cost=cost)  # type: ignore[arg-type]
    for sequences in ([[1, 2], [3]], torch.ones(2, 2), ["ab", "c"], None):
        with pytest.raises(TypeError, match=r"lengths is not an iterable of numbers: .*map\(len, sequences\)"):
            gpipe.pack(sequences, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lengths\[1\]=-1 is -1.*\n.*lengths\[2\]=nan is nan"):
        gpipe.pack([1, -1, float("nan")], 2, cost=LINEAR)
