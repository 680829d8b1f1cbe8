"""Scores by hand, what needs no network, and a table that fits."""

import json
import re
from collections import Counter
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.recipe import Evaluation
from gpipe.recipes.translation.corpus import Corpus
from gpipe.recipes.translation.recipe import Decode, Scores, bleu, chrf, evaluate_translations, table
from tests.support.toy_language import options


def test_scores_by_hand() -> None:
    assert chrf(["abc"], ["abd"]) == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)
    # of four words 3 are met, of three pairs 2, of two triples 1, and the one of four counts as half a match
    assert bleu(["a b c d"], ["a b c e"]) == pytest.approx(100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** (1 / 4))
    assert bleu(["a b"], ["a c"]) == pytest.approx(100 * (1 / 2 * 1 / 2) ** (1 / 2))  # there is nothing longer
    assert bleu(["yes"], ["yes"]) == bleu(["yes", "old cat"], ["yes", "old cat"]) == pytest.approx(100.0)
    assert bleu(["cat"], ["old cat"]) < 100.0  # too short
    assert chrf([""], ["cat"]) == bleu([""], ["cat"]) == 0.0


def knowing(corpus: Corpus) -> Decode:
    """What says the right English of each source, but of `mirror` nothing at all."""
    right = {tuple(one.source): one.english for one in corpus.test if one.pair.language == "toy"}

    return lambda sources, width: [right.get(tuple(source), []) for source in sources]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(options(tmp_path_factory.mktemp("corpus")))


def evaluated(corpus: Corpus, width: int) -> Evaluation:
    return evaluate_translations(
        corpus, {"toy": (6.0, 4), "mirror": (2.0, 4)}, knowing(corpus), tokens=64, width=width
    )


def test_every_language_is_compared_with_what_needs_no_network(corpus: Corpus) -> None:
    found = evaluated(corpus, width=3)
    toy, mirror = (found.details["languages"][language] for language in ("toy", "mirror"))
    assert found.details["languages"].keys() == {"toy", "mirror"}
    frequent = Counter(pair.english for pair in corpus.split.train).most_common(1)[0][0]
    for language, own in (("toy", toy), ("mirror", mirror)):
        of = [one.pair for one in corpus.test if one.pair.language == language]
        right = [pair.english for pair in of]
        assert own["test"] == len(right)
        assert own["train"] == sum(pair.language == language for pair in corpus.split.train)
        assert own["copy_chrf"] == chrf([pair.source for pair in of], right)
        assert own["frequent_chrf"] == chrf([frequent] * len(right), right)
    assert [toy[name] for name in ("nll", "chrf", "bleu", "beam_chrf", "beam_bleu")] == pytest.approx(
        [1.5, *[100.0] * 4]
    )
    assert [mirror[name] for name in ("nll", "chrf", "bleu", "beam_chrf", "beam_bleu")] == [0.5, 0, 0, 0, 0]
    assert found.numbers["nll"] == 1.0
    assert 0 < found.numbers["chrf"] < 100
    assert found.details["test"] == len(corpus.test) == toy["test"] + mirror["test"]
    assert all(one["greedy"] == one["english"] for one in found.details["examples"] if one["language"] == "toy")
    json.dumps({**found.numbers, **found.details}, allow_nan=False)


def test_a_beam_of_one_is_none_and_translations_come_in_the_order_of_the_test(corpus: Corpus) -> None:
    found = evaluated(corpus, width=1)
    assert not {"beam_chrf", "beam_bleu"} & found.numbers.keys()
    assert {one["beam"] for one in found.details["examples"]} == {None}
    assert [one["source"] for one in found.details["examples"]] == [one.pair.source for one in corpus.test]
    assert re.search(r"^all .* - +- ", found.text, re.MULTILINE)


SCORES = st.builds(
    Scores,
    *[st.integers(0, 999_999), st.integers(1, 99_999), st.floats(0, 12), *[st.floats(0, 100)] * 2],
    *[st.none() | st.floats(0, 100)] * 2,
    *[st.floats(0, 100)] * 2,
).filter(lambda scores: (scores.beam_chrf is None) == (scores.beam_bleu is None))


@given(
    st.dictionaries(st.sampled_from(["de", "zh_Hant", "sr_Latn", "und", "all"]), SCORES, min_size=1),
    st.integers(1, 16),
)
def test_a_table_fits_80_columns_and_has_a_line_for_each_language(scores: dict[str, Scores], width: int) -> None:
    overall = next(iter(scores.values()))
    head, under, *lines, last = table(scores, overall, width)
    assert max(map(len, [head, under, *lines, last])) <= 80
    assert len({len(line) for line in (head, *lines, last)}) == 1  # columns are below each other
    assert sorted(line.split()[0] for line in lines) == sorted(scores)
    assert last.startswith("all ")
    assert [int(line.split()[1]) for line in lines] == sorted((one.train for one in scores.values()), reverse=True)
    for line in lines:
        numbers = astuple(scores[line.split()[0]])
        shown = [float(word) if word != "-" else None for word in line.split()[1:]]
        for one, number in zip(shown, numbers, strict=True):
            assert one == (number if number is None else pytest.approx(number, abs=0.051))
