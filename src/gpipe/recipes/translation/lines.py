"""Translates lines of text by a run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from gpipe.recipes.options.files import recipe_of
from gpipe.recipes.trained import open_recipe, opened
from gpipe.recipes.translation.decode import beam, greedy
from gpipe.recipes.translation.recipe import VOCABULARY, TranslationRecipe
from gpipe.recipes.world import World

Translator = Callable[[Sequence[str]], Iterator[str]]
LONGEST = 4
"""Times as many subwords as the longest sentence that was trained on; what is longer is refused."""


@contextmanager
def opened_translator(run: Path, partitions: int | None, width: int) -> Iterator[Translator]:
    """Gives what translates lines to English, by a beam of so many, as long as the run is open.

    Raises:
        ValueError: The folder is of no run of the recipe, or it has no weights.
        ImportError: A library is missing.
    """
    world = World()
    if (name := recipe_of(run)) != TranslationRecipe.name:
        raise ValueError(f"{run} is a run of the recipe {name}: give one of `gpipe train translation`")
    if not (run / VOCABULARY).is_file():
        raise ValueError(
            f"{run} has no {VOCABULARY}, which says what its network reads: give a run that has all files"
        )
    recipe = open_recipe(run, partitions, world, tsv=None)  # what it was trained on need not be there
    assert isinstance(recipe, TranslationRecipe)
    with opened(recipe, world) as trained:
        vocabulary, network = recipe.vocabulary, recipe.network(trained.pipe)

        most = LONGEST * recipe.options.longest

        def to_english(lines: Sequence[str]) -> Iterator[str]:
            """Translates lines, up to the first that is too long; what is empty stays so."""
            sources = vocabulary.encode_all([line.strip() for line in lines])
            short = list(takewhile(lambda source: len(source) <= most, sources))
            said = [source for source in short if source]
            found = iter(greedy(network, said) if width == 1 else beam(network, said, width))
            for source in short:
                yield " ".join(vocabulary.decode(next(found)).splitlines()) if source else ""
            if len(short) < len(sources):
                raise ValueError(
                    f"it is {len(sources[len(short)])} subwords long, and sentences of {recipe.options.longest} were "
                    f"trained on: give it in parts, of {most} at most"
                )

        yield to_english
