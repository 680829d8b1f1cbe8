"""Two languages of one grammar whose words stand for an English one each; and small recipes that learn them."""

import random
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe.recipes.data.pairs import Pair
from gpipe.recipes.options.training import TranslationOptions
from gpipe.recipes.prepare import Epoch, Job, prepare
from gpipe.recipes.training import run, take_steps
from gpipe.recipes.translation.recipe import TranslationRecipe

WORDS = (
    ("the", "a"),
    ("old", "red", "big", "new"),
    ("cat", "dog", "tree"),
    ("sees", "likes"),
    ("the", "a"),
    ("bird", "house"),
)
SHIFT = 7  # of letters
SMALL = {"layers": 1, "model_dim": 32, "heads": 2, "head_dim": 12, "ffn_dim": 40, "vocabulary": 300}


def in_toy(word: str) -> str:
    """What an English word is in the language `toy`.

    >>> in_toy("cat"), in_mirror("cat")
    ('jha', 'tac')
    """
    return "".join(chr((ord(letter) - ord("a") + SHIFT) % 26 + ord("a")) for letter in word)


def in_mirror(word: str) -> str:
    return word[::-1]


def pairs(count: int) -> list[Pair]:
    """So many sentences at most, in no order, each in `toy`, and every third in `mirror` too."""
    return [
        Pair(language, " ".join(map(word_of, words)), " ".join(words))
        for number, words in enumerate(_sentences()[:count])
        for language, word_of in (("toy", in_toy), ("mirror", in_mirror))
        if language == "toy" or number % 3 == 0
    ]


def _sentences() -> Sequence[tuple[str, ...]]:
    """All 288 of the grammar, also without an adjective or without an object, so that they differ in length."""
    every = list(product(*WORDS))
    shorter = [(*words[:1], *words[2:]) for words in every] + [words[:4] for words in every]
    found = sorted({*every, *shorter})
    random.Random(0).shuffle(found)
    return found


def write_table(file: Path, given: Sequence[Pair]) -> Path:
    """Writes pairs as `--tsv` reads them."""
    file.write_text("".join(f"{pair.language}\t{pair.source}\t{pair.english}\n" for pair in given))
    return file


def options(folder: Path, **changes: Any) -> TranslationOptions:
    """Those of a small network, on a table of 120 sentences and their mirrors, in mini-batches of some sizes."""
    table = folder / "pairs.tsv"
    if not table.exists():
        write_table(table, pairs(120))
    small = {"tsv": table, "partitions": 2, "micro_batches": 3, "tokens": 400, "longest": 60, "warm_up": 4}
    return TranslationOptions(**{**SMALL, **small, "out": folder / "out", **changes})


def job_of(given: TranslationOptions) -> Job:
    """A training that is ready; no layer is measured."""
    recipe = TranslationRecipe(given.resolved())
    return prepare(recipe, measure=False)


def train(given: TranslationOptions) -> list[Epoch]:
    return run(job_of(given), Console(quiet=True))


def steps_of(job: Job, count: int) -> list[float]:
    """Takes the first steps; gives their losses."""
    job.progress.losses = losses = list[float]()
    take_steps(job, islice(job.recipe.batches(1, 0, job.share), count), losses.append)
    return losses
