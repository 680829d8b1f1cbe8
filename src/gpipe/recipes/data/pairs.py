"""Sentences with their English translations: of tables, or of Django's catalogues; split by what the English says."""

import hashlib
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpipe.recipes.data import imported

UNKNOWN_LANGUAGE = "und"  # what BCP 47 calls a language that nobody named
ENGLISH = "en"  # and en_GB, en_AU: translations from English into English
MISTAKES_SHOWN = 10
TEST, VALIDATION = 0.1, 0.05  # shares of the English texts
ROUND, EPOCH = 1, 2  # set the draws of rounds apart from those of epochs, and both from those of other modules


class Pair(NamedTuple):
    """A text in a language, such as `"de"` or `"zh_Hant"`, and what it is in English."""

    language: str
    source: str
    english: str


class Split(NamedTuple):
    """Pairs to learn from, to choose by, and to judge with; no English text is in two of them."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


def split_by_english(pairs: Iterable[Pair]) -> Split:
    """Splits pairs by their English text, so that none of the test is seen in training in any language.

    A tenth of the English texts goes to the test and a twentieth to validation, by `place_of` alone: more
    pairs move none of the others. Each part keeps the order of `pairs`.
    """
    split = Split([], [], [])
    for pair in pairs:
        place = place_of(pair.english)
        part = split.test if place < TEST else split.validation if place < TEST + VALIDATION else split.train
        part.append(pair)
    return split


def place_of(english: str) -> float:
    """Returns a number in [0, 1) that is a function of the text alone, apart from case, blanks and what ends it."""
    text = english.casefold().strip()
    while text and (text[-1].isspace() or unicodedata.category(text[-1]).startswith("P")):
        text = text[:-1]
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def read_tsv(file: str | PathLike[str]) -> list[Pair]:
    """Reads pairs from a table in UTF-8 whose columns are separated by tabs, without a heading.

    The columns are language, source and English, or only source and English, whose language is then `"und"`. Blank
    lines are skipped, spaces around a text are not part of it, and quotation marks mean themselves. A ValueError
    lists the first ten lines that are not so, or says that there is no pair.
    """
    pairs, mistakes = [], []
    for number, line in enumerate(Path(file).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode()
            if text.strip():
                pairs.append(_pair_of(text.rstrip("\r").split("\t")))
        except UnicodeDecodeError as error:
            mistakes.append(f"line {number} is not in UTF-8, from byte {error.start + 1} on; save the file as UTF-8")
        except ValueError as error:
            mistakes.append(f"line {number} {error}")
    if mistakes:
        more = [f"and {len(mistakes) - MISTAKES_SHOWN} more"] if len(mistakes) > MISTAKES_SHOWN else []
        raise ValueError("\n  ".join([f"{file} cannot be read as pairs:", *mistakes[:MISTAKES_SHOWN], *more]))
    if not pairs:
        raise ValueError(f"{file} holds no pairs; write one a line: language, source and English, separated by tabs")
    return pairs


def _pair_of(columns: list[str]) -> Pair:
    columns = [column.strip() for column in columns]
    if len(columns) not in (2, 3):
        remedy = "write two (source, English) or three (language, source, English), separated by tabs"
        raise ValueError(f"has {len(columns)} column{'s' * (len(columns) > 1)}; {remedy}")
    names = ("language", "source", "English")[-len(columns) :]
    if empty := [name for name, column in zip(names, columns, strict=True) if not column]:
        raise ValueError(f"says nothing in: {', '.join(empty)}; fill the column or delete the line")
    return Pair(*[UNKNOWN_LANGUAGE, *columns][-3:])


def read_catalogues() -> list[Pair]:
    """Reads every translation in the Django that is installed: short texts, the same in all languages.

    Each (source, English) stands once per language, sorted by language, then English, then source; of plurals the
    first and the last form, which go with the English singular and plural. Texts that are blank or left in English
    are left out. Django 5.2.19 gives 65,472 in 96 languages.
    """
    what = "the translations come with Django and are read by polib"
    django, polib = (imported(name, what, "translation") for name in ("django", "polib"))
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
    """Returns how probable a language is by how many pairs it has: p ~ count^(1 / temperature).

    Temperature 1 leaves the shares as they are, a higher one evens them out, infinity makes them equal.
    """
    most = max(counts.values())
    weights = {language: math.pow(count / most, 1 / temperature) for language, count in counts.items()}
    total = math.fsum(weights.values())
    return {language: weight / total for language, weight in weights.items()}


def draw(pairs: Sequence[Pair], temperature: float, count: int, *, seed: int, epoch: int) -> list[int]:
    """Returns the numbers of the `count` pairs that an epoch sees: a function of the arguments, at any epoch.

    Of each language come `count` times its probability, rounded so that the sum is `count`. They come in rounds: each
    pair once in a new order, then all again, and an epoch goes on where the one before it stopped.
    """
    numbers: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        numbers.setdefault(pair.language, []).append(number)
    probabilities = language_probabilities({name: len(numbers[name]) for name in sorted(numbers)}, temperature)
    drawn: list[int] = []
    for index, (language, quota) in enumerate(_quotas(probabilities, count).items()):
        own, start, end = numbers[language], epoch * quota, (epoch + 1) * quota
        for turn in range(start // len(own), -(-end // len(own))):
            order, before = np.random.default_rng((seed, index, turn, ROUND)).permutation(len(own)), turn * len(own)
            drawn += [own[place] for place in order[max(start - before, 0) : end - before]]
    order = np.random.default_rng((seed, epoch, EPOCH)).permutation(len(drawn))
    return [drawn[place] for place in order]


def _quotas(probabilities: Mapping[str, float], count: int) -> dict[str, int]:
    """Rounds `count` x probability down, and gives what is left over to the largest remainders."""
    shares = {language: round(count * share, 6) for language, share in probabilities.items()}
    quotas = {language: math.floor(share) for language, share in shares.items()}
    by_remainder = sorted(shares, key=lambda language: quotas[language] - shares[language])
    for language in by_remainder[: count - sum(quotas.values())]:
        quotas[language] += 1
    return quotas
