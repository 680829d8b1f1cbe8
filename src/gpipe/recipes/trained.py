"""A run that is over, or was left: its recipe and its network again, to be evaluated, recorded or used.

The numbers of several runs, and how far they are apart; what crosses between processes; lines of text in English.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import tyro

import gpipe
from gpipe.recipes.files import EVALUATION, WEIGHTS, one_thread
from gpipe.recipes.images import DigitsRecipe, ImagesRecipe
from gpipe.recipes.job import Job, Progress, precision
from gpipe.recipes.learning import Averages
from gpipe.recipes.options.files import CONFIG, OPTIONS, read_config, recipe_of, to_flags
from gpipe.recipes.options.training import TrainOptions, flag
from gpipe.recipes.prepare import build, make_pipe, read_weights
from gpipe.recipes.recipe import Evaluation, Recipe, load
from gpipe.recipes.training import train_epoch
from gpipe.recipes.translation.decode import beam, greedy
from gpipe.recipes.translation.recipe import VOCABULARY, TranslationRecipe
from gpipe.recipes.world import World

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


MESSAGES = "messages.jsonl"


def record_run(run: Path, steps: int, partitions: int | None, world: World) -> str:
    """Trains a run for some steps more, which leave nothing but what crossed, in `run`/messages.jsonl.

    Returns:
        What there was, in words.

    Raises:
        ValueError: The folder is none of a run, or it has no weights.
        ImportError: A library is missing.
    """
    recipe = open_recipe(run, partitions, world, steps=steps)
    layers = build(recipe)
    load(read_weights(run), layers)
    pipe, how = make_pipe(recipe, layers, [1.0] * len(layers), world)
    optimizer = recipe.optimizer(pipe.parameters())
    job = Job(recipe, pipe, optimizer, Averages(optimizer, 0.0), Progress(), world, how)
    batches = zip(range(min(steps, recipe.steps_per_epoch)), recipe.batches(1, 0, job.share), strict=False)
    with pipe, one_thread(), gpipe.record(pipe, keep=steps) as recording:
        train_epoch(job, 1, batches, lambda loss: None)
        messages = recording.messages()
        if not world.rank:
            recording.save(run / MESSAGES)
    count, size = Counter(one.kind for one in messages), Counter[str]()
    for one in messages:
        size[one.kind] += one.bytes
    said = [f"{kind} {number}, {size[kind] / 2**20:.2f} MiB" for kind, number in sorted(count.items())]
    return f"{run / MESSAGES}: {len(messages)} messages of {len(recording.timelines)} steps: {'; '.join(said)}"


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
