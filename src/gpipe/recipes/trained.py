"""A run that is over, or was left: its recipe and its network again, to be evaluated or used.

Evaluates runs, and says how far several are apart.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import tyro

import gpipe
from gpipe.recipes.by_name import make_recipe
from gpipe.recipes.files import EVALUATION, WEIGHTS
from gpipe.recipes.job import precision
from gpipe.recipes.options.files import CONFIG, OPTIONS, read_config, recipe_of, to_flags
from gpipe.recipes.options.training import flag
from gpipe.recipes.plain import one_thread
from gpipe.recipes.prepare import build, make_pipe, read_weights
from gpipe.recipes.recipe import Evaluation, Recipe, load
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


def evaluate_run(run: Path, partitions: int | None, changes: Mapping[str, Any], world: World) -> Evaluation:
    """Evaluates a run, and writes evaluation.json into its folder.

    Args:
        run: Its folder.
        partitions: K; None: as many as there are processes, or 2.
        changes: Options of the recipe in place of the run's, by name; None: the run's.
        world: The processes that evaluate together.

    Raises:
        ValueError: The folder is none of a run, or it has no weights.
        ImportError: A library is missing.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    recipe_name = recipe_of(run)
    known = {field.name for field in fields(OPTIONS[recipe_name])} if recipe_name in OPTIONS else set(given)
    if odd := [flag(name) for name in given if name not in known]:
        raise ValueError(f"{', '.join(odd)} says nothing to the recipe {recipe_name}, which {run} is a run of")
    recipe = open_recipe(run, partitions, world, **given)
    with opened(recipe, world) as trained:
        found = recipe.evaluate(trained.pipe)
    if not (run / WEIGHTS).is_file():
        unfinished = "the run has not ended: by the weights of its latest checkpoint, no average of them\n"
        found = replace(found, text=unfinished + found.text)
    if not world.rank:
        text = json.dumps({**found.numbers, **found.details}, indent=1, ensure_ascii=False)
        (run / EVALUATION).write_text(text + "\n", encoding="utf-8")
    return found


def spread(found: Sequence[Evaluation]) -> str:
    """The mean and the standard deviation of each number over several runs.

    >>> print(spread([Evaluation({"top1": 0.9}, {}, ""), Evaluation({"top1": 0.8}, {}, "")]))
    2 runs: mean and standard deviation
    top1  0.8500 +- 0.0707
    """
    names = [name for name in found[0].numbers if all(name in one.numbers for one in found)]
    if not names:
        return f"{len(found)} runs, which have no number in common: give runs of one recipe"
    width = max(map(len, names))
    lines = []
    for name in names:
        values = [one.numbers[name] for one in found]
        lines.append(f"{name:{width}}  {mean(values):.4f} +- {stdev(values):.4f}")
    return "\n".join([f"{len(found)} runs: mean and standard deviation", *lines])
