"""What is learnt from, and that nothing that is judged by is among it."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from gpipe.recipes.data.pairs import Pair, read_catalogues
from gpipe.recipes.data.token_batches import Vocabulary
from gpipe.recipes.options.training import TranslationOptions
from gpipe.recipes.translation.corpus import Corpus, batch_by_length
from tests.support.toy_language import options, pairs, write_table


def plain(english: str) -> str:
    """A text apart from case, and from what is around it."""
    return re.sub(r"^\s+|[\s.,:;!?…]+$", "", english.lower())


def english(part: Iterable[Pair]) -> set[str]:
    return {plain(pair.english) for pair in part}


@pytest.fixture(scope="module")
def catalogues() -> list[Pair]:
    return read_catalogues()


@pytest.fixture(autouse=True)
def read_once(catalogues: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe.recipes.translation.corpus.read_catalogues", lambda: catalogues)


@pytest.mark.parametrize("languages", [(), ("de",), ("nl", "sv", "zh_Hant")], ids=str)
def test_no_english_that_is_judged_by_is_learnt_from_in_any_language(
    languages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def learn(texts: Iterable[str], size: int) -> Vocabulary:
        given.extend(texts)
        return kept(given[:2000], size)

    kept = Vocabulary.learn
    monkeypatch.setattr(Vocabulary, "learn", learn)
    corpus = Corpus(TranslationOptions(vocabulary=500, languages=languages))
    train, validation, test = map(english, corpus.split)
    assert train
    assert validation
    assert test
    assert not train & (validation | test)
    assert not validation & test
    assert not languages or {pair.language for pair in corpus.split.train} == set(languages)
    assert {pair.language for pair in corpus.split.test} <= {pair.language for pair in corpus.split.train}
    assert given
    assert set(given) <= {text for pair in corpus.split.train for text in (pair.source, pair.english)}


def test_every_mini_batch_is_of_training_sentences_and_an_epoch_has_as_many_as_told(tmp_path: Path) -> None:
    corpus = Corpus(options(tmp_path, longest=16))
    train = set(corpus.split.train)
    for epoch in (1, 2):
        made = corpus.mini_batches(epoch)
        assert len(made) == corpus.steps_per_epoch
        assert {one.pair for some in made for one in some} <= train
        assert all(max(one.lengths) <= 16 for some in made for one in some)
        assert sum(map(len, made)) <= len(corpus.train)
    assert corpus.mini_batches(1) == corpus.mini_batches(1) != corpus.mini_batches(2)


def test_all_that_is_judged_by_is_judged_once_also_what_is_long(tmp_path: Path) -> None:
    corpus = Corpus(options(tmp_path, longest=12, tokens=64))
    assert max(max(one.lengths) for one in corpus.test) > 12
    some = batch_by_length(corpus.test, 1)
    assert sorted([one.pair for rows in some for one in rows], key=repr) == sorted(corpus.split.test, key=repr)


def test_fewer_sentences_to_judge_by_are_of_the_same_english_in_each_language(tmp_path: Path) -> None:
    whole = Corpus(options(tmp_path)).test
    for most in (1, 2):
        some = Corpus(options(tmp_path, sentences=most)).test
        assert {one.pair for one in some} <= {one.pair for one in whole}
        per_language = Counter(one.pair.language for one in some)
        assert per_language.keys() == {one.pair.language for one in whole}
        assert max(per_language.values()) == most
    first = next(one.pair for one in some if one.pair.language == "mirror")
    both = {one.pair.language for one in whole if one.pair.english == first.english}
    assert both == {"toy", "mirror"}


def test_what_leaves_nothing_to_learn_from_is_refused(tmp_path: Path) -> None:
    few = write_table(tmp_path / "few.tsv", [pair for pair in pairs(3) if pair.language == "toy"])
    for changes, told in (
        (
            {"languages": ("toy", "de", "xx")},
            "--languages: de, xx does not occur in the data. Choose from mirror, toy.",
        ),
        ({"longest": 1}, "--longest: no training pair has at most 1 tokens"),
        ({"tsv": few}, "3 pairs, split by text, leave validation, test empty"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            Corpus(options(tmp_path, **changes))
