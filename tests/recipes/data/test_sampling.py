"""Which rows and pairs an epoch sees, and in which order."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.data.augment import batches
from gpipe.recipes.data.pairs import Pair, draw, language_probabilities

COUNTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 12), min_size=1)
TEMPERATURES = st.floats(0.5, 20) | st.sampled_from([1e-2, float("inf")])
SEEDS = st.integers(0, 2**40)


def pairs_of(counts: dict[str, int]) -> list[Pair]:
    return [Pair(language, f"{number}", "") for language, count in counts.items() for number in range(count)]


@given(COUNTS, TEMPERATURES)
def test_probabilities_are_the_counts_to_one_over_temperature(counts: dict[str, int], temperature: float) -> None:
    total = sum(count ** (1 / temperature) for count in counts.values())
    expected = {language: count ** (1 / temperature) / total for language, count in counts.items()}
    assert language_probabilities(counts, temperature) == pytest.approx(expected)


@given(COUNTS, TEMPERATURES, st.integers(0, 60), SEEDS)
def test_each_language_comes_as_often_as_is_probable_and_no_pair_again_before_all_of_its_language(
    counts: dict[str, int], temperature: float, count: int, seed: int
) -> None:
    pairs, seen = pairs_of(counts), Counter[int]()
    for epoch in range(4):
        drawn = draw(pairs, temperature, count, seed=seed, epoch=epoch)
        assert len(drawn) == count
        found = Counter(pairs[number].language for number in drawn)
        for language, probability in language_probabilities(counts, temperature).items():
            assert abs(found[language] - count * probability) < 1 + 1e-6
        seen.update(drawn)
        for language in counts:
            times = [seen[number] for number, pair in enumerate(pairs) if pair.language == language]
            assert max(times) - min(times) <= 1
    assert sorted(draw(pairs, 1, len(pairs), seed=seed, epoch=count)) == list(range(len(pairs)))


@given(st.integers(1, 60), st.data(), SEEDS, st.integers(0, 1000))
def test_an_epoch_visits_rows_at_most_once_in_whole_batches(
    rows: int, data: st.DataObject, seed: int, epoch: int
) -> None:
    size = data.draw(st.integers(1, rows))
    made = batches(rows, size, seed=seed, epoch=epoch)
    visited = torch.cat(made).tolist()
    assert [len(batch) for batch in made] == [size] * (rows // size)
    assert len(set(visited)) == len(visited)
    assert set(visited) <= set(range(rows))


def test_orders_and_draws_depend_on_seed_and_epoch_alone() -> None:
    pairs = pairs_of({"a": 50, "b": 5})

    def drawn(seed: int, epoch: int) -> list[list[int]]:
        rows = torch.cat(batches(100, 10, seed=seed, epoch=epoch)).tolist()
        return [rows, draw(pairs, 5, 40, seed=seed, epoch=epoch)]

    torch.manual_seed(1)
    first = drawn(1, 2)
    torch.manual_seed(2)
    assert first == drawn(1, 2)
    for other in (drawn(1, 3), drawn(2, 2)):
        assert all(one != another for one, another in zip(first, other, strict=True))
