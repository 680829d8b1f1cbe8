"""Translates lines of text by a run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpipe.recipes.trained import open_recipe, opened
from gpipe.recipes.translation.decode import beam, greedy
from gpipe.recipes.translation.recipe import TranslationRecipe
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
    recipe = open_recipe(run, partitions, world)
    if not isinstance(recipe, TranslationRecipe):
        raise ValueError(f"{run} is a run of the recipe {recipe.name}: give one of `gpipe train translation`")
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
