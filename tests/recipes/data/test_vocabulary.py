import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.data import BEGIN, END, PAD, Vocabulary, read_catalogues

LANGUAGES = ("de", "fr", "hi", "ja", "ru", "th")
TEXT = st.text(st.characters(codec="utf-8"))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    pairs = [pair for pair in read_catalogues() if pair.language in LANGUAGES]
    return [text for pair in pairs for text in (pair.source, pair.english)]


@pytest.fixture(scope="module")
def vocabulary(texts: list[str]) -> Vocabulary:
    return Vocabulary.learn(texts, size=1200)


@given(
    text=TEXT | st.sampled_from(["<pad>", "[PAD]", "</s>", "  two  spaces ", "\r\n\t\0", "e\u0301 \u00e9", "🤷🏽‍♀️"])
)
def test_every_text_comes_back_to_the_letter(vocabulary: Vocabulary, text: str) -> None:
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert not {PAD, BEGIN, END} & set(ids)
    assert all(number < len(vocabulary) for number in ids)


def test_what_it_learnt_from_comes_back_in_few_pieces(vocabulary: Vocabulary, texts: list[str]) -> None:
    encoded = vocabulary.encode_all(texts)
    assert [vocabulary.decode(ids) for ids in encoded] == texts
    assert [vocabulary.encode(text) for text in texts[:20]] == encoded[:20]
    assert sum(map(len, encoded)) < sum(len(text.encode()) for text in texts) / 2


@given(text=TEXT, more=TEXT)
def test_specials_say_nothing_and_the_first_end_ends(vocabulary: Vocabulary, text: str, more: str) -> None:
    ids = [BEGIN, *vocabulary.encode(text), PAD, END, *vocabulary.encode(more), END]
    assert vocabulary.decode(ids) == text


def test_any_ids_can_be_said(vocabulary: Vocabulary) -> None:
    assert isinstance(vocabulary.decode(range(len(vocabulary))), str)
    assert "\N{REPLACEMENT CHARACTER}" in vocabulary.decode(
        vocabulary.encode("é")[:1] + vocabulary.encode("\x80")[:1]
    )


def test_learning_twice_gives_one_vocabulary(vocabulary: Vocabulary, texts: list[str], tmp_path: Path) -> None:
    vocabulary.save(tmp_path / "first.json")
    Vocabulary.learn(iter(texts), size=1200).save(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()


def test_a_saved_vocabulary_is_the_same(vocabulary: Vocabulary, texts: list[str], tmp_path: Path) -> None:
    vocabulary.save(tmp_path / "vocabulary.json")
    loaded = Vocabulary.load(tmp_path / "vocabulary.json")
    assert len(loaded) == len(vocabulary) == 1200
    assert loaded.encode_all(texts) == vocabulary.encode_all(texts)


def test_few_texts_give_a_small_vocabulary() -> None:
    assert len(Vocabulary.learn([], size=500)) == 259


def test_mistakes_are_told(vocabulary: Vocabulary, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size is 258; choose at least 259"):
        Vocabulary.learn([], size=258)
    with pytest.raises(ValueError, match=r"ids \[1200, -1\] are not in this vocabulary, whose ids are 0 to 1199"):
        vocabulary.decode([5, 1200, -1])
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is no vocabulary .*; give a file that Vocabulary.save wrote"):
        Vocabulary.load(tmp_path / "other.json")
    with pytest.raises(FileNotFoundError):
        Vocabulary.load(tmp_path / "none.json")


def test_without_tokenizers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'gpipe\[translation\]'"):
        Vocabulary.learn([], size=300)
