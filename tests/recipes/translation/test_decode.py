"""Decoding, by networks that are a function of (source, beginning) and nothing else."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpipe.recipes.data.token_batches import BEGIN, END, PAD, padded
from gpipe.recipes.translation import translator
from gpipe.recipes.translation.translator import Search, beam, greedy, limit_of

NEVER = -1e9
Words = Sequence[int]


class Toy:
    """A network of so many words that draws its logits by lot, the same for the same source and beginning.

    Args:
        seed: Decides them.
        size: Words, with PAD, BEGIN and END.
        sharpness: How far logits are apart.
        ends: Whether it ever says END.
    """

    def __init__(self, seed: int, size: int = 5, sharpness: float = 1.0, *, ends: bool = True) -> None:
        self.size = size
        self._seed, self._sharpness, self._ends = seed, sharpness, ends
        self.logs = cache(self._logs)

    def _logs(self, source: tuple[int, ...], begun: tuple[int, ...]) -> Tensor:
        """Log-probabilities [size] of the word after what has begun."""
        drawn = np.random.default_rng((self._seed, *source, self.size, *begun)).normal(size=self.size)
        logits = torch.tensor(drawn, dtype=torch.float32) * self._sharpness
        if not self._ends:
            logits[END] = NEVER
        return logits.log_softmax(dim=0)

    def __call__(self, words: Tensor, begun: Tensor) -> Tensor:
        """Gives what decoding asks, the last position alone, and looks at how it is asked."""
        assert (begun[:, 0] == BEGIN).all()
        rows = []
        for source, row in zip(words.tolist(), begun.tolist(), strict=True):
            end = source.index(END)
            assert set(source[end + 1 :]) <= {PAD}
            rows.append(self.logs(tuple(source[:end]), tuple(row)))
        return torch.stack(rows)[:, None]

    def score(self, source: Words, said: Words) -> float:
        """The log-probability of words said, END among them, over the penalty of their number."""
        total = sum(float(self.logs(tuple(source), (BEGIN, *said[:at]))[word]) for at, word in enumerate(said))
        return total / ((5 + len(said)) / 6) ** 0.6


@contextmanager
def limited(words: int) -> Iterator[None]:
    """Translations have so many words at most, END included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translator, "limit_of", lambda source: words)
        yield


def by_hand(network: Toy, source: Words, limit: int) -> tuple[list[int], bool]:
    """The likeliest word each time; gives also whether the last was END."""
    said: list[int] = []
    while len(said) < limit:
        word = int(network(padded([[*source, END]]), torch.tensor([[BEGIN, *said]]))[0, -1].argmax())
        if word == END:
            return said, True
        said.append(word)
    return said, False


TOYS = st.builds(Toy, st.integers(0, 10**6), st.integers(4, 9), st.floats(0.1, 4))
SOURCES = st.lists(st.lists(st.integers(3, 9), max_size=5).map(tuple), max_size=4)
WIDTHS = st.integers(1, 4)


@given(TOYS, SOURCES)
def test_greedy_takes_the_likeliest_word_each_time(network: Toy, sources: list[Words]) -> None:
    assert greedy(network, sources) == [by_hand(network, source, limit_of(source))[0] for source in sources]


@given(TOYS, SOURCES, WIDTHS)
def test_sentences_are_translated_together_as_one_by_one(network: Toy, sources: list[Words], width: int) -> None:
    """And a beam asks for no more rows than it follows."""

    def counting(words: Tensor, begun: Tensor) -> Tensor:
        assert len(words) == len(begun) <= width * len(sources)
        return network(words, begun)

    assert greedy(network, sources) == [greedy(network, [source])[0] for source in sources]
    assert beam(counting, sources, width) == [beam(network, [source], width)[0] for source in sources]


@given(TOYS, SOURCES.filter(bool), st.integers(1, 3))
def test_a_beam_that_follows_all_finds_the_best_there_is(network: Toy, sources: list[Words], limit: int) -> None:
    others = [word for word in range(network.size) if word != END]
    every = [[*words, END] for length in range(limit) for words in product(others, repeat=length)]
    with limited(limit):
        found = beam(network, sources, network.size**limit)
    for source, said in zip(sources, found, strict=True):
        best = max(network.score(source, words) for words in every)
        assert network.score(source, [*said, END]) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize(("cost", "said"), [(1.09, [5]), (1.106, [])])
def test_a_longer_translation_wins_by_the_penalty_alone(cost: float, said: list[int]) -> None:
    """END at once costs 0.7, a word and END `cost` times as much: they win below (7 / 6)^0.6 = 1.097 times."""
    first = torch.full((9,), NEVER).index_put((torch.tensor([5, END]),), torch.tensor([-0.6861, -0.7]))
    then = torch.full((9,), NEVER).index_put((torch.tensor([6, END]),), torch.tensor([0.0, -0.7 * cost + 0.6861]))
    then[6] = (1 - then[END].exp()).log()

    def network(words: Tensor, begun: Tensor) -> Tensor:
        return (first if begun.shape[1] == 1 else then).expand(len(begun), 1, 9)

    assert first.exp().sum().item() == pytest.approx(1, abs=1e-3)
    with limited(2):
        assert beam(network, [[3]], 3) == [said]


class Patient(Search):
    """A search that goes on as long as it may."""

    @property
    def is_finished(self) -> bool:
        return len(self.partials[0]) > limit_of(self.source)


@given(TOYS, SOURCES, WIDTHS)
def test_a_search_that_ends_early_has_missed_nothing(network: Toy, sources: list[Words], width: int) -> None:
    early = beam(network, sources, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translator, "Search", Patient)
        assert beam(network, sources, width) == early


def test_a_search_ends_early() -> None:
    """A network that is sure of every word is asked once for each, and no more."""
    asked = []

    def sure(words: Tensor, begun: Tensor) -> Tensor:
        asked.append(begun.shape[1])
        said = begun.shape[1] - 1
        return torch.full((len(begun), 1, 9), -20.0).index_fill(2, torch.tensor([[5, 6, END][min(said, 2)]]), 0.0)

    assert beam(sure, [[3] * 50], 4) == greedy(sure, [[3] * 50]) == [[5, 6]]
    assert asked == [1, 2, 3] * 2


@given(TOYS, SOURCES, WIDTHS)
def test_a_translation_is_ended_at_its_limit(network: Toy, sources: list[Words], width: int) -> None:
    def unasked(words: Tensor, begun: Tensor) -> Tensor:
        raise AssertionError

    endless, some = Toy(1, size=9, ends=False), [[], [3], [3, 4, 5, 6], [4]]
    for decoder in (greedy, partial(beam, width=width)):
        for source, said in zip(sources, decoder(network, sources), strict=True):
            assert len(said) <= limit_of(source)
            assert not {END} & set(said)
        assert [len(said) for said in decoder(endless, some)] == [10, 12, 18, 12]
        assert decoder(unasked, []) == []
