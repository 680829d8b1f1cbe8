"""Translating through a pipe, in one process or by processes that have a stage each."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpipe
from gpipe.recipes.data.token_batches import END
from gpipe.recipes.translation.recipe import TranslationRecipe
from tests.support.toy_language import options


def recipe_of(folder: Path, **changes: Any) -> TranslationRecipe:
    return TranslationRecipe(options(folder, **{"layers": 2, "sentences": 4, **changes}).settled())


def layers_of(recipe: TranslationRecipe) -> list[nn.Module]:
    """Untrained layers that say something else of each sentence, and come to an END at times."""
    torch.manual_seed(6)
    layers = recipe.layers()
    with torch.no_grad():
        for name, weight in nn.Sequential(*layers).named_parameters():
            if name.endswith("weight") and weight.dim() > 1 and len(weight) < len(recipe.vocabulary):
                weight.mul_(2)
        layers[-1].get_parameter("bias")[END] += 1.6
    return layers


def sources_of(recipe: TranslationRecipe) -> list[list[int]]:
    return [one.source for one in recipe.corpus.test]


def piped(recipe: TranslationRecipe, **how: Any) -> gpipe.GPipe:
    model, sample = recipe.model(layers_of(recipe))
    how = {"partitions": 2, "micro_batches": 3, "costs": "params", **how}
    return gpipe.GPipe(model, sample=sample, **how).eval()


def translated(recipe: TranslationRecipe, width: int, **how: Any) -> list[list[int]]:
    with piped(recipe, **how) as pipe:
        return recipe.translate(pipe, sources_of(recipe), width)


def translate(
    rank: int, world: int, folder: str, model: str, matrices: int, widths: list[int]
) -> list[list[list[int]]]:
    """What a rank gets: of one micro-batch, whose masks are too large to be told at first, and of three."""
    recipe = recipe_of(Path(folder), model=model, matrices=matrices)
    return [translated(recipe, width, partitions=world, micro_batches=width, driver="process") for width in widths]
