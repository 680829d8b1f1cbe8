"""Pairs of tables and of Django's catalogues, and how they are split."""

from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.data.pairs import Pair, hash_of, read_catalogues, read_tsv, split_by_english

LANGUAGES = st.sampled_from(["de", "fr", "zh_Hant"])
PAIRS = st.lists(st.builds(Pair, LANGUAGES, st.text(), st.text(max_size=4)))
PINNED = "5.2.19"


@given(PAIRS, PAIRS)
def test_no_english_is_in_two_parts_no_pair_is_lost_and_other_pairs_move_none(
    pairs: list[Pair], others: list[Pair]
) -> None:
    split = split_by_english(pairs)
    train, validation, test = ({pair.english for pair in part} for part in split)
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert sorted([*split.train, *split.validation, *split.test], key=repr) == sorted(pairs, key=repr)
    assert set(split.test) <= set(split_by_english([*others, *pairs]).test)


@given(st.text(), st.sampled_from(["", " ", ".", "!?", " …", "。\n"]))
def test_the_place_does_not_go_by_case_and_what_ends_a_text(text: str, end: str) -> None:
    assert hash_of(text) == hash_of(f" {text}{end}") == hash_of(text.casefold())


def test_a_tenth_is_for_the_test_and_the_split_is_fixed_for_good() -> None:
    split = split_by_english([Pair("de", "", f"text {number}") for number in range(10_000)])
    assert len(split.test) == pytest.approx(1000, abs=100)
    assert len(split.validation) == pytest.approx(500, abs=70)
    assert [round(hash_of(text), 6) for text in ("Yes", "No")] == [0.540917, 0.576418]


WORD = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(str.strip).filter(bool)


@given(pairs=st.lists(st.builds(Pair, LANGUAGES, WORD, WORD), min_size=1))
def test_a_table_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, pairs: list[Pair]) -> None:
    table = tmp_path_factory.mktemp("tables") / "pairs.tsv"
    table.write_bytes("\n".join("\t".join(pair) for pair in pairs).encode())
    assert read_tsv(table) == pairs


def test_what_other_programs_add_to_a_table_is_understood(tmp_path: Path) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_bytes('\ufeffde\t"ja"\tyes\r\n\r\n bonjour \tgood day\r\n'.encode())
    assert read_tsv(table) == [Pair("de", '"ja"', "yes"), Pair("und", "bonjour", "good day")]


def test_all_mistakes_of_a_table_are_told_at_once(tmp_path: Path) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_bytes(b"de\tja\tyes\nalone\nde\t\tno\nde\ta\tb\tc\n\xff\tno\n" + b"alone\n" * 10)
    with pytest.raises(ValueError, match="contains invalid lines") as caught:
        read_tsv(table)
    told = str(caught.value).splitlines()
    assert told[1].startswith("  line 2: 1 columns. Write 2 (source, English) or 3")
    assert told[2] == "  line 3: source is empty. Fill the column, or delete the line."
    assert told[3].startswith("  line 4: 4 columns.")
    assert told[4] == "  line 5: byte 1 is not valid UTF-8. Save the file as UTF-8."
    assert (len(told), told[-1]) == (12, "  and 4 more")
    table.write_text("\n\n")
    with pytest.raises(ValueError, match="contains no pairs"):
        read_tsv(table)


def test_django_gives_each_translation_once_and_plurals_with_their_english() -> None:
    pairs = read_catalogues()
    assert len(set(pairs)) == len(pairs)
    assert all(pair.source.strip() and pair.english and pair.source != pair.english for pair in pairs)
    assert not {pair.language for pair in pairs} & {"en", "en_GB", "en_AU"}
    assert pairs == sorted(pairs, key=lambda pair: (pair.language, pair.english, pair.source))
    assert {Pair("de", "%(num)d Tag", "%(num)d day"), Pair("de", "%(num)d Tage", "%(num)d days")} <= set(pairs)
    assert Pair("de", "%(num)d Tag", "%(num)d days") not in pairs
    split = split_by_english(pairs)
    assert {pair.language for pair in split.train} == {pair.language for pair in pairs}
    assert 0.07 < len(split.test) / len(pairs) < 0.13
    if version("django") == PINNED:
        per_language = Counter(pair.language for pair in pairs)
        assert (len(pairs), len(per_language)) == (65_472, 96)
        assert per_language.most_common()[0] == ("cs", 902)
        assert per_language.most_common()[-1] == ("fy", 20)
