"""Sentences with their English translations, read from tables, and split by what the English says.

Django's catalogues: what its forms and pages say in some hundred languages, as pairs with the English.
"""

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polib import MOEntry


UNKNOWN_LANGUAGE = "und"  # what BCP 47 calls a language that nobody named
MISTAKES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Pair:
    """A text in a language, such as `"de"` or `"zh_Hant"`, and what it is in English.

    >>> Pair("de", source="Guten Tag", english="Good day").english
    'Good day'
    """

    language: str
    source: str
    english: str


@dataclass(frozen=True, slots=True)
class Split:
    """Pairs to learn from, to choose by, and to judge with; no English text is in two of them."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


def split_by_english(pairs: Iterable[Pair], held_out: float = 0.1) -> Split:
    """Splits pairs by their English text, so that none of the test is seen in training in any language.

    The share `held_out` of the English texts, a tenth by default, goes to the test and half as much (a twentieth) to
    validation. Which part a text falls into is a function of that text and of `held_out` alone: more pairs move none
    of the others. Texts that differ in case, in whitespace around them or in punctuation at their end fall together;
    a singular and its plural are two texts.
    Each part keeps the order of `pairs`.

    >>> split = split_by_english([Pair("de", "Ja.", "Yes."), Pair("fr", "oui", "yes"), Pair("fr", "non", "No")])
    >>> len(split.train), len(split.validation), len(split.test)
    (3, 0, 0)

    Raises:
        ValueError: `held_out` leaves nothing to train on, or is negative.
    """
    if not 0 <= held_out < 2 / 3:
        raise ValueError(
            f"held_out is {held_out}; choose a share from 0 to less than 2/3, for half as much again is validation"
        )
    split = Split([], [], [])
    for pair in pairs:
        place = place_of(pair.english)
        part = split.test if place < held_out else split.validation if place < 1.5 * held_out else split.train
        part.append(pair)
    return split


def place_of(english: str) -> float:
    """Returns a number in [0, 1) that is a function of the text alone, apart from case and what ends it.

    >>> place_of(" Delete? ") == place_of("delete")
    True
    """
    digest = hashlib.sha256(_normalised(english).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _normalised(text: str) -> str:
    text = text.casefold().strip()
    while text and (text[-1].isspace() or unicodedata.category(text[-1]).startswith("P")):
        text = text[:-1]
    return text


def read_tsv(file: str | PathLike[str]) -> list[Pair]:
    r"""Reads pairs from a table in UTF-8 whose columns are separated by tabs, without a heading.

    The columns are language, source and English, or only source and English, whose language is then `"und"`.
    Blank lines are skipped, and spaces around a text are not part of it. Quotation marks mean themselves.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     table = Path(folder, "pairs.tsv")
    ...     _ = table.write_text("de\tja\tyes\nbonjour\tgood day\n")
    ...     read_tsv(table)
    [Pair(language='de', source='ja', english='yes'), Pair(language='und', source='bonjour', english='good day')]

    Raises:
        ValueError: Lines that are not in UTF-8 or not of two or three filled columns (the first ten are listed), or
            no pair at all.
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
        raise ValueError(_message(file, mistakes))
    if not pairs:
        raise ValueError(f"{file} holds no pairs; write one a line: language, source and English, separated by tabs")
    return pairs


def _pair_of(columns: Sequence[str]) -> Pair:
    columns = [column.strip() for column in columns]
    if len(columns) not in (2, 3):
        raise ValueError(
            f"has {len(columns)} column{'s' * (len(columns) > 1)}; write two (source, English) or three (language, "
            "source, English), separated by tabs"
        )
    *language, source, english = columns
    names = ("language", "source", "English")[-len(columns) :]
    empty = [name for name, column in zip(names, columns, strict=True) if not column]
    if empty:
        raise ValueError(f"says nothing in: {', '.join(empty)}; fill the column or delete the line")
    return Pair(language[0] if language else UNKNOWN_LANGUAGE, source, english)


def _message(file: str | PathLike[str], mistakes: Sequence[str]) -> str:
    more = len(mistakes) - MISTAKES_SHOWN
    shown = [*mistakes[:MISTAKES_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return "\n  ".join([f"{file} cannot be read as pairs:", *shown])


ENGLISH = "en"  # and en_GB, en_AU: translations from English into English


def read_catalogues() -> list[Pair]:
    """Reads every translation in the Django that is installed: short texts, the same in all languages.

    Each (source, English) stands once per language. Texts that were left as they are in English, and blank ones, are
    left out; of the plurals the first and the last form are taken, which go with the English singular and plural.
    Django is not started: only its compiled catalogues are read, which hold no translation marked as doubtful.
    The pairs are sorted by language, then English, then source. Django 5.2.19 gives 65,472 in 96 languages.

    >>> pairs = read_catalogues()
    >>> [pair.source for pair in pairs if (pair.language, pair.english) == ("de", "Yes")]
    ['Ja']

    Raises:
        ImportError: Django, or polib, which reads its files, is not installed.
    """
    pairs = {
        Pair(language, source, english)
        for file in _find_files()
        if (language := file.parts[-3]).split("_")[0] != ENGLISH
        for source, english in _translations(file)
        if source.strip() and source != english
    }
    return sorted(pairs, key=lambda pair: (pair.language, pair.english, pair.source))


def _find_files() -> list[Path]:
    """The catalogues `.../locale/LANGUAGE/LC_MESSAGES/NAME.mo` of Django, which need not be imported for that."""
    found = find_spec("django")
    if found is None or found.origin is None or find_spec("polib") is None:
        raise ImportError("the translations come with Django and are read by polib: pip install 'gpipe[translation]'")
    return sorted(Path(found.origin).parent.glob("**/locale/*/LC_MESSAGES/*.mo"))


def _translations(file: Path) -> Iterator[tuple[str, str]]:
    """Yields (source, English) of a catalogue."""
    from polib import mofile

    for entry in mofile(str(file)):
        yield from _of_entry(entry)


def _of_entry(entry: "MOEntry") -> Iterator[tuple[str, str]]:
    if not entry.msgid_plural:
        yield entry.msgstr, entry.msgid
        return
    forms = [entry.msgstr_plural[number] for number in sorted(entry.msgstr_plural)]
    yield forms[0], entry.msgid
    yield forms[-1], entry.msgid_plural
