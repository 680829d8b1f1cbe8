from collections import Counter
from importlib.machinery import ModuleSpec
from importlib.metadata import version

import pytest

from gpipe.recipes.data import Pair, read_catalogues, split_by_english
from gpipe.recipes.data.pairs import place_of

PINNED = "5.2.19"


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return read_catalogues()


def test_each_pair_is_a_translation_met_once(pairs: list[Pair]) -> None:
    assert len(set(pairs)) == len(pairs)
    assert all(pair.source.strip() and pair.english and pair.source != pair.english for pair in pairs)
    assert not {pair.language for pair in pairs} & {"en", "en_GB", "en_AU"}
    assert pairs == sorted(pairs, key=lambda pair: (pair.language, pair.english, pair.source))


@pytest.mark.skipif(version("django") != PINNED, reason=f"counted in Django {PINNED}")
def test_how_many_pairs_the_pinned_version_holds(pairs: list[Pair]) -> None:
    per_language = Counter(pair.language for pair in pairs)
    assert (len(pairs), len(per_language)) == (65_472, 96)
    assert per_language.most_common()[0] == ("cs", 902)
    assert per_language.most_common()[-1] == ("fy", 20)


def test_plurals_go_with_their_english(pairs: list[Pair]) -> None:
    assert {Pair("de", "%(num)d Tag", "%(num)d day"), Pair("de", "%(num)d Tage", "%(num)d days")} <= set(pairs)
    assert Pair("de", "%(num)d Tag", "%(num)d days") not in pairs


def test_no_test_english_is_learnt_from_in_any_language(pairs: list[Pair]) -> None:
    split = split_by_english(pairs)
    train, validation, test = (
        {place_of(pair.english) for pair in part} for part in (split.train, split.validation, split.test)
    )
    assert not train & test
    assert not train & validation
    assert not validation & test
    assert len(split.train) + len(split.validation) + len(split.test) == len(pairs)
    assert {pair.language for pair in split.train} == {pair.language for pair in pairs}
    assert 0.07 < len(split.test) / len(pairs) < 0.13


@pytest.mark.parametrize("missing", ["django", "polib"])
def test_without_its_libraries_the_error_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == missing else ModuleSpec(name, None, origin="/nowhere/__init__.py")

    monkeypatch.setattr("gpipe.recipes.data.pairs.find_spec", find)
    with pytest.raises(ImportError, match=r"pip install 'gpipe\[translation\]'"):
        read_catalogues()
