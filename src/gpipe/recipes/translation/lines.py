"""Translates lines of text by a run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpipe.recipes.options.files import recipe_of
from gpipe.recipes.trained import open_recipe, opened
from gpipe.recipes.translation.decode import beam, greedy
from gpipe.recipes.translation.recipe import VOCABULARY, TranslationRecipe
from gpipe.recipes.world import World

Translator = Callable[[Sequence[str]], list[str]]


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

        def to_english(lines: Sequence[str]) -> list[str]:
            """Translates lines; what is empty stays so."""
            texts = [line.strip() for line in lines]
            sources = vocabulary.encode_all([text for text in texts if text])
            found = greedy(network, sources) if width == 1 else beam(network, sources, width)
            english = map(vocabulary.decode, found)
            return [" ".join(next(english).splitlines()) if text else "" for text in texts]

        yield to_english
