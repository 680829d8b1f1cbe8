"""Loads sentences with English translations from a table or from Django.

Splits the sentences and samples languages.
"""

import hashlib
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpipe.recipes.data import require

UNKNOWN_LANGUAGE = "und"  # The BCP 47 code of an undetermined language.
ENGLISH = "en"  # Also the prefix of en_GB and en_AU, which translate English to English.
PROBLEMS_SHOWN = 10
TEST, VALIDATION = 0.1, 0.05  # Shares of the English texts.
ROUND, EPOCH = 1, 2  # Keys of random numbers, different from the keys in other modules.


class Pair(NamedTuple):
    """A text in a language, such as `"de"` or `"zh_Hant"`, with its English translation."""

    language: str
    source: str
    english: str


class Split(NamedTuple):
    """Training, validation and test pairs. Each English text occurs in only one of the three splits."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


def split_by_english(pairs: Iterable[Pair]) -> Split:
    """Splits pairs by their English text, so that no English text of the test pairs occurs in the training pairs.

    A tenth of the English texts is for the test, and a twentieth for validation. The hash of a text decides, so
    existing pairs do not move if pairs are added. Each split keeps the order of the pairs.
    """
    split = Split([], [], [])
    for pair in pairs:
        value = hash_of(pair.english)
        part = split.test if value < TEST else split.validation if value < TEST + VALIDATION else split.train
        part.append(pair)
    return split


def hash_of(english: str) -> float:
    """Returns a hash of a text in [0, 1). Ignores case, surrounding spaces and punctuation at the end."""
    text = english.casefold().strip()
    while text and (text[-1].isspace() or unicodedata.category(text[-1]).startswith("P")):
        text = text[:-1]
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def read_tsv(file: str | PathLike[str]) -> list[Pair]:
    """Reads pairs from a UTF-8 file with tab-separated columns and without a header.

    The columns are language, source and English, or only source and English; the language is then `"und"`. Blank
    lines and spaces around texts are ignored. Quotation marks have no special meaning.

    Raises:
        ValueError: If lines are invalid, or if the file contains no pairs. The message lists the first ten lines.
    """
    pairs, problems = [], []
    for number, line in enumerate(Path(file).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode()
            if text.strip():
                pairs.append(_pair_of(text.rstrip("\r").split("\t")))
        except UnicodeDecodeError as error:
            problems.append(f"line {number}: byte {error.start + 1} is not valid UTF-8. Save the file as UTF-8.")
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = [f"and {len(problems) - PROBLEMS_SHOWN} more"] if len(problems) > PROBLEMS_SHOWN else []
        raise ValueError("\n  ".join([f"--tsv: {file} contains invalid lines:", *problems[:PROBLEMS_SHOWN], *more]))
    if not pairs:
        raise ValueError(f"--tsv: {file} contains no pairs. Write language, source and English, separated by tabs.")
    return pairs


def _pair_of(columns: list[str]) -> Pair:
    columns = [column.strip() for column in columns]
    if len(columns) not in (2, 3):
        raise ValueError(
            f"{len(columns)} columns. Write 2 (source, English) or 3 (language, source, English), separated by tabs."
        )
    names = ("language", "source", "English")[-len(columns) :]
    if empty := [name for name, column in zip(names, columns, strict=True) if not column]:
        raise ValueError(f"{' and '.join(empty)} is empty. Fill the column, or delete the line.")
    return Pair(*[UNKNOWN_LANGUAGE, *columns][-3:])


def read_catalogues() -> list[Pair]:
    """Reads all translations of the installed Django: short texts of its user interface in many languages.

    Returns each pair of source and English once per language, sorted by language, English and source. A text with
    plural forms yields two pairs: the first form with the English singular, and the last form with the plural. Blank
    and untranslated texts are skipped. Django 5.2.19 contains 65,472 pairs in 96 languages.
    """
    problem = "The default translations require Django and polib"
    django, polib = (require(name, problem, "translation") for name in ("django", "polib"))
    pairs = {
        Pair(language, source, english)
        for file in Path(django.__file__).parent.glob("**/locale/*/LC_MESSAGES/*.mo")
        if (language := file.parts[-3]).split("_")[0] != ENGLISH
        for source, english in _translations(polib.mofile(str(file)))
        if source.strip() and source != english
    }
    return sorted(pairs, key=lambda pair: (pair.language, pair.english, pair.source))


def _translations(catalogue: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for entry in catalogue:
        forms = [entry.msgstr_plural[number] for number in sorted(entry.msgstr_plural)] or [entry.msgstr]
        yield forms[0], entry.msgid
        if entry.msgid_plural:
            yield forms[-1], entry.msgid_plural


def language_probabilities(counts: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Returns the sampling probability of each language, which is proportional to count^(1 / temperature).

    With temperature 1, probabilities are proportional to the numbers of pairs. With temperature infinity, all
    probabilities are equal.
    """
    most = max(counts.values())
    weights = {language: math.pow(count / most, 1 / temperature) for language, count in counts.items()}
    total = math.fsum(weights.values())
    return {language: weight / total for language, weight in weights.items()}


def draw(pairs: Sequence[Pair], temperature: float, count: int, *, seed: int, epoch: int) -> list[int]:
    """Samples the `count` pairs of an epoch, and returns their indices in random order.

    The number of pairs of a language is `count` times its probability, rounded so that the sum is `count`. For each
    language, all pairs are used once before a pair is used again. An epoch continues where the previous epoch
    stopped. The result depends only on the arguments.
    """
    numbers: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        numbers.setdefault(pair.language, []).append(number)
    probabilities = language_probabilities({name: len(numbers[name]) for name in sorted(numbers)}, temperature)
    drawn: list[int] = []
    for index, (language, quota) in enumerate(_quotas(probabilities, count).items()):
        available, start, end = numbers[language], epoch * quota, (epoch + 1) * quota
        size = len(available)
        for turn in range(start // size, -(-end // size)):
            order, before = np.random.default_rng((seed, index, turn, ROUND)).permutation(size), turn * size
            drawn += [available[place] for place in order[max(start - before, 0) : end - before]]
    order = np.random.default_rng((seed, epoch, EPOCH)).permutation(len(drawn))
    return [drawn[place] for place in order]


def _quotas(probabilities: Mapping[str, float], count: int) -> dict[str, int]:
    """Rounds `count` times the probabilities so that the sum is `count`, by the largest remainders."""
    shares = {language: round(count * share, 6) for language, share in probabilities.items()}
    quotas = {language: math.floor(share) for language, share in shares.items()}
    by_remainder = sorted(shares, key=lambda language: quotas[language] - shares[language])
    for language in by_remainder[: count - sum(quotas.values())]:
        quotas[language] += 1
    return quotas
