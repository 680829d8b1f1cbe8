"""Evaluates runs, and says how far several are apart."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from gpipe.recipes.files import EVALUATION, WEIGHTS
from gpipe.recipes.options.by_name import OPTIONS
from gpipe.recipes.options.files import recipe_of
from gpipe.recipes.options.training import flag
from gpipe.recipes.recipe import Evaluation
from gpipe.recipes.trained import open_recipe, opened
from gpipe.recipes.world import World


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
