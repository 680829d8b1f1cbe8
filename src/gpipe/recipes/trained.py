"""A run that is over, or was left: its recipe and its network again, to be evaluated or used."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

import gpipe
from gpipe.recipes.by_name import make_recipe
from gpipe.recipes.job import precision
from gpipe.recipes.options.by_name import OPTIONS
from gpipe.recipes.options.files import CONFIG, read_config, recipe_of, to_flags
from gpipe.recipes.plain import one_thread
from gpipe.recipes.prepare import build, make_pipe, read_weights
from gpipe.recipes.recipe import Recipe, load
from gpipe.recipes.world import World


@dataclass(frozen=True, eq=False)
class Trained:
    """A recipe beside a pipe that has the weights of a run."""

    recipe: Recipe[Any]
    pipe: gpipe.GPipe


def open_recipe(run: Path, partitions: int | None, world: World, **changes: Any) -> Recipe[Any]:
    """The recipe of a run, with its options, but for the number of partitions.

    Raises:
        ValueError: The folder is none of a run, or the options cannot be.
        ImportError: A library is missing.
    """
    name = recipe_of(run)
    if name not in OPTIONS:
        raise ValueError(f"{run / CONFIG} is of the recipe {name}: there are {', '.join(OPTIONS)}")
    table = {key: value for key, value in read_config(run / CONFIG).items() if key not in ("partitions", "plan")}
    flags = to_flags(table, name, OPTIONS[name], run / CONFIG)
    options = tyro.cli(OPTIONS[name], args=flags)
    options = replace(options, partitions=partitions, out=run, from_=None, resume=True, **changes)
    try:
        return make_recipe(name, options.settled(world.size if world.launched else None))
    except ValueError as mistake:
        raise ValueError(f"{run / CONFIG} cannot be gone by: {mistake}") from None


@contextmanager
def opened(recipe: Recipe[Any], world: World) -> Iterator[Trained]:
    """Builds the network of a run, with its weights, in evaluation mode.

    Raises:
        ValueError: The run has no weights.
    """
    layers = build(recipe)
    load(read_weights(recipe.options.out), layers)
    pipe, _ = make_pipe(recipe, layers, [1.0] * len(layers), world)
    with pipe, one_thread(), torch.no_grad(), precision(recipe.options, pipe.devices[0]):
        pipe.eval()
        yield Trained(recipe, pipe)
