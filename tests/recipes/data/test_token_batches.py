"""A vocabulary from which every text comes back, and mini-batches of pairs by their tokens."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.data.pairs import read_catalogues
from gpipe.recipes.data.token_batches import BEGIN, END, PAD, Vocabulary, steps_per_epoch, token_batches

LENGTHS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=40)
TOKENS = st.integers(62, 400)
SEEDS = st.integers(0, 2**40)
LANGUAGES = ("de", "fr", "hi", "ja", "ru", "th")
TEXT = st.text(st.characters(codec="utf-8"))
Lengths = list[tuple[int, int]]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    pairs = [pair for pair in read_catalogues() if pair.language in LANGUAGES]
    return [text for pair in pairs for text in (pair.source, pair.english)]


@pytest.fixture(scope="module")
def vocabulary(texts: list[str]) -> Vocabulary:
    return Vocabulary.learn(texts, size=1200)


@given(
    text=TEXT | st.sampled_from(["<pad>", "[PAD]", "</s>", "  two  spaces ", "\r\n\t\0", "e\u0301 \u00e9", "🤷🏽‍♀️"]),
    more=TEXT,
)
def test_every_text_comes_back_to_the_letter_and_what_follows_an_end_says_nothing(
    vocabulary: Vocabulary, text: str, more: str
) -> None:
    ids, others = vocabulary.encode_all([text, more])
    assert vocabulary.decode(ids) == text
    assert not {PAD, BEGIN, END} & set(ids)
    assert all(number < len(vocabulary) for number in ids)
    assert vocabulary.decode([BEGIN, *ids, PAD, END, *others, END]) == text


def test_what_it_learnt_from_comes_back_in_few_pieces_and_any_ids_can_be_said(
    vocabulary: Vocabulary, texts: list[str]
) -> None:
    encoded = vocabulary.encode_all(texts)
    assert [vocabulary.decode(ids) for ids in encoded] == texts
    assert sum(map(len, encoded)) < sum(len(text.encode()) for text in texts) / 2
    assert isinstance(vocabulary.decode(range(len(vocabulary))), str)
    first, second = vocabulary.encode_all(["é", "\x80"])
    assert "\N{REPLACEMENT CHARACTER}" in vocabulary.decode(first[:1] + second[:1])
    assert len(Vocabulary.learn([], size=500)) == 259


def test_a_saved_vocabulary_is_the_same_and_learning_twice_gives_one(
    vocabulary: Vocabulary, texts: list[str], tmp_path: Path
) -> None:
    vocabulary.save(tmp_path / "first.json")
    Vocabulary.learn(iter(texts), size=1200).save(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    loaded = Vocabulary.load(tmp_path / "first.json")
    assert len(loaded) == len(vocabulary) == 1200
    assert loaded.encode_all(texts) == vocabulary.encode_all(texts)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json: is not a vocabulary"):
        Vocabulary.load(tmp_path / "other.json")


@given(LENGTHS, TOKENS, st.data(), SEEDS, st.integers(0, 1000))
def test_exactly_as_many_batches_as_asked_for_and_each_within_tokens(
    lengths: Lengths, tokens: int, data: st.DataObject, seed: int, epoch: int
) -> None:
    whole = steps_per_epoch(lengths, tokens)
    steps = data.draw(st.just(whole) | st.integers(1, len(lengths)))
    made = token_batches(lengths, tokens, steps, seed=seed, epoch=epoch)
    assert len(made) == steps
    for batch in made:
        sides = zip(*(lengths[row] for row in batch), strict=True)
        assert 0 < len(batch) * sum(max(side) + 1 for side in sides) <= tokens
    visited = torch.cat(made).tolist()
    assert len(set(visited)) == len(visited)
    assert steps < whole or sorted(visited) == list(range(len(lengths)))


def test_real_pairs_are_padded_little() -> None:
    pairs = read_catalogues()[::7]
    vocabulary = Vocabulary.learn((pair.english for pair in pairs), size=1000)
    sides = (vocabulary.encode_all([pair[side] for pair in pairs]) for side in (1, 2))
    lengths = [(len(source), len(target)) for source, target in zip(*sides, strict=True)]
    laid_out = filled = 0
    for batch in token_batches(lengths, 4096, steps_per_epoch(lengths, 4096), seed=0, epoch=1):
        rows = [lengths[row] for row in batch]
        laid_out += len(rows) * sum(max(side) + 1 for side in zip(*rows, strict=True))
        filled += sum(map(sum, rows)) + 2 * len(rows)
    assert 1 - filled / laid_out < 0.25


def test_batches_depend_on_seed_and_epoch_alone_and_come_in_no_order_of_length() -> None:
    lengths = [(number % 20, number % 7) for number in range(300)]

    def made(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in token_batches(lengths, 200, 20, seed=seed, epoch=epoch)]

    assert made(1, 2) == made(1, 2)
    assert made(1, 2) != made(1, 3)
    assert made(1, 2) != made(2, 2)
    longest = [max(sum(lengths[row]) for row in batch) for batch in made(1, 2)]
    assert longest != sorted(longest)
