"""Evaluates runs, and says how far several are apart."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from gpipe.recipes.options.files import recipe_of
from gpipe.recipes.recipe import Evaluation
from gpipe.recipes.trained import open_recipe, opened
from gpipe.recipes.world import World

EVALUATION = "evaluation.json"


def evaluate_run(run: Path, partitions: int | None, beam: int | None, world: World) -> Evaluation:
    """Evaluates a run, and writes evaluation.json into its folder.

    Raises:
        ValueError: The folder is none of a run, or it has no weights.
        ImportError: A library is missing.
    """
    changes = {} if beam is None else {"beam": beam}
    if changes and recipe_of(run) != "translation":
        raise ValueError(f"--beam is for translations, and {run} is a run of the recipe {recipe_of(run)}")
    recipe = open_recipe(run, partitions, world, **changes)
    with opened(recipe, world) as trained:
        found = recipe.evaluate(trained.pipe)
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
