"""The recipes, by their names."""

from typing import Any

from gpipe.recipes.images.recipe import DigitsRecipe, ImagesRecipe
from gpipe.recipes.options.training import TrainOptions
from gpipe.recipes.recipe import Recipe
from gpipe.recipes.translation.recipe import TranslationRecipe

RECIPES: dict[str, type[Recipe[Any]]] = {
    recipe.name: recipe for recipe in (DigitsRecipe, ImagesRecipe, TranslationRecipe)
}


def make_recipe(name: str, options: TrainOptions) -> Recipe[Any]:
    """Opens the data of a recipe.

    Raises:
        ValueError: The options cannot be: what to do, a line for each.
        ImportError: A library is missing that has or reads them; the message names it.
    """
    return RECIPES[name](options)
