from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.data import Pair, read_tsv, split_by_english
from gpipe.recipes.data.pairs import place_of

LANGUAGES = st.sampled_from(["de", "fr", "zh_Hant"])
PAIRS = st.lists(st.builds(Pair, LANGUAGES, st.text(), st.text(max_size=4)))


@given(PAIRS, st.floats(0, 0.6))
def test_no_english_is_in_two_parts_and_no_pair_is_lost(pairs: list[Pair], held_out: float) -> None:
    split = split_by_english(pairs, held_out)
    train, validation, test = (
        {pair.english for pair in part} for part in (split.train, split.validation, split.test)
    )
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert sorted([*split.train, *split.validation, *split.test], key=repr) == sorted(pairs, key=repr)


@given(PAIRS, PAIRS)
def test_other_pairs_move_none(pairs: list[Pair], others: list[Pair]) -> None:
    assert set(split_by_english(pairs).test) <= set(split_by_english([*others, *pairs]).test)


@given(st.text(), st.sampled_from(["", " ", ".", "!?", " …", "。\n"]))
def test_the_place_does_not_go_by_case_and_what_ends_a_text(text: str, end: str) -> None:
    assert place_of(text) == place_of(f" {text}{end}") == place_of(text.casefold())


def test_shares_are_those_asked_for() -> None:
    split = split_by_english([Pair("de", "", f"text {number}") for number in range(10_000)])
    assert len(split.test) == pytest.approx(1000, abs=100)
    assert len(split.validation) == pytest.approx(500, abs=70)


def test_the_split_is_fixed_for_good() -> None:
    assert [round(place_of(text), 6) for text in ("Yes", "No")] == [0.540917, 0.576418]


@pytest.mark.parametrize("held_out", [-0.1, 0.7, float("nan")])
def test_a_share_that_leaves_nothing_is_refused(held_out: float) -> None:
    with pytest.raises(ValueError, match=f"held_out is {held_out}; choose a share from 0"):
        split_by_english([], held_out)


WORD = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(str.strip).filter(bool)


@given(pairs=st.lists(st.builds(Pair, LANGUAGES, WORD, WORD), min_size=1))
def test_a_table_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, pairs: list[Pair]) -> None:
    table = tmp_path_factory.mktemp("tables") / "pairs.tsv"
    lines = ["\t".join([pair.language, pair.source, pair.english]) for pair in pairs]
    table.write_bytes("\n".join(lines).encode())
    assert read_tsv(table) == pairs


def test_what_other_programs_add_is_understood(tmp_path: Path) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_bytes('\ufeffde\t"ja"\tyes\r\n\r\n bonjour \tgood day\r\n'.encode())
    assert read_tsv(table) == [Pair("de", '"ja"', "yes"), Pair("und", "bonjour", "good day")]


def test_all_mistakes_of_a_table_are_told_at_once(tmp_path: Path) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_bytes(b"de\tja\tyes\nalone\nde\t\tno\nde\ta\tb\tc\n\xff\tno\n" + b"alone\n" * 10)
    with pytest.raises(ValueError, match="cannot be read as pairs") as caught:
        read_tsv(table)
    told = str(caught.value).splitlines()
    assert told[1].startswith("  line 2 has 1 column; write two (source, English) or three")
    assert told[2] == "  line 3 says nothing in: source; fill the column or delete the line"
    assert told[3].startswith("  line 4 has 4 columns;")
    assert told[4] == "  line 5 is not in UTF-8, from byte 1 on; save the file as UTF-8"
    assert len(told) == 12
    assert told[-1] == "  and 4 more"


def test_a_table_without_pairs_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_text("\n\n")
    with pytest.raises(ValueError, match="holds no pairs; write one a line"):
        read_tsv(table)
