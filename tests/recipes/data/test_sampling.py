from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.data import Pair, draw, language_probabilities

COUNTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 12), min_size=1)
TEMPERATURES = st.floats(0.5, 20)
SEEDS = st.integers(0, 2**40)


def pairs_of(counts: dict[str, int]) -> list[Pair]:
    return [Pair(language, f"{number}", "") for language, count in counts.items() for number in range(count)]


@given(COUNTS, TEMPERATURES)
def test_probabilities_are_the_counts_to_one_over_temperature(counts: dict[str, int], temperature: float) -> None:
    found = language_probabilities(counts, temperature)
    total = sum(count ** (1 / temperature) for count in counts.values())
    assert sum(found.values()) == pytest.approx(1)
    for language, count in counts.items():
        assert found[language] == pytest.approx(count ** (1 / temperature) / total)


@given(COUNTS, TEMPERATURES)
def test_a_higher_temperature_evens_out(counts: dict[str, int], temperature: float) -> None:
    cool, warm = (language_probabilities(counts, t) for t in (temperature, 2 * temperature))
    rarest = min(counts, key=lambda language: counts[language])
    assert warm[rarest] >= cool[rarest] - 1e-12
    assert max(warm.values()) <= max(cool.values()) + 1e-12


def test_extreme_temperatures() -> None:
    counts = {"a": 1, "b": 10**9}
    assert language_probabilities(counts, float("inf")) == {"a": 0.5, "b": 0.5}
    assert language_probabilities(counts, 1e-3) == {"a": 0.0, "b": 1.0}


def test_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"temperature is 0; choose one above 0.*languages without pairs.*: a, b"):
        language_probabilities({"a": 0, "b": -1, "c": 1}, 0)
    with pytest.raises(ValueError, match="there are no languages"):
        draw([], 1, 1, seed=0, epoch=0)
    with pytest.raises(ValueError, match="count is -1"):
        draw(pairs_of({"a": 1}), 1, -1, seed=0, epoch=0)


@given(COUNTS, SEEDS, st.integers(0, 50))
def test_at_temperature_one_an_epoch_is_a_permutation(counts: dict[str, int], seed: int, epoch: int) -> None:
    pairs = pairs_of(counts)
    assert sorted(draw(pairs, 1, len(pairs), seed=seed, epoch=epoch)) == list(range(len(pairs)))


@given(COUNTS, TEMPERATURES, st.integers(0, 60), SEEDS, st.integers(0, 20))
def test_each_language_comes_as_often_as_is_probable(
    counts: dict[str, int], temperature: float, count: int, seed: int, epoch: int
) -> None:
    pairs = pairs_of(counts)
    drawn = draw(pairs, temperature, count, seed=seed, epoch=epoch)
    assert len(drawn) == count
    found = Counter(pairs[number].language for number in drawn)
    for language, probability in language_probabilities(counts, temperature).items():
        assert abs(found[language] - count * probability) < 1 + 1e-6


@given(COUNTS, TEMPERATURES, st.integers(0, 60), SEEDS)
def test_no_pair_comes_again_before_all_of_its_language(
    counts: dict[str, int], temperature: float, count: int, seed: int
) -> None:
    pairs = pairs_of(counts)
    seen: Counter[int] = Counter()
    for epoch in range(4):
        seen.update(draw(pairs, temperature, count, seed=seed, epoch=epoch))
        for language in counts:
            times = [seen[number] for number, pair in enumerate(pairs) if pair.language == language]
            assert max(times) - min(times) <= 1


def test_the_draw_depends_on_its_arguments_alone() -> None:
    pairs = pairs_of({"a": 50, "b": 5})
    first = draw(pairs, 5, 40, seed=1, epoch=2)
    assert first == draw(pairs, 5, 40, seed=1, epoch=2)
    assert first != draw(pairs, 5, 40, seed=1, epoch=3)
    assert first != draw(pairs, 5, 40, seed=2, epoch=2)
