"""A run that is over, or was left: its recipe and its network again, to be evaluated, recorded or used."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import gpipe
from gpipe.recipes.images import DigitsRecipe, ImagesRecipe
from gpipe.recipes.options.files import CONFIG, read_options, recipe_of
from gpipe.recipes.options.training import OPTIONS, flag
from gpipe.recipes.prepare import EVALUATION, WEIGHTS, Job, build, make_pipe, one_thread, precision, read_weights
from gpipe.recipes.recipe import Evaluation, Recipe, load
from gpipe.recipes.training import take_steps
from gpipe.recipes.translation.recipe import VOCABULARY, TranslationRecipe
from gpipe.recipes.world import World

RECIPES: dict[str, type[Recipe[Any]]] = {one.name: one for one in (DigitsRecipe, ImagesRecipe, TranslationRecipe)}
MESSAGES = "messages.jsonl"
LONGEST = 4  # times as many subwords as the longest sentence that was trained on; what is longer is refused
Translator = Callable[[Sequence[str]], Iterator[str]]


def open_recipe(run: Path, partitions: int | None, world: World, **changes: Any) -> Recipe[Any]:
    """The recipe of a run, with its options, but for the number of partitions and for changes."""
    name = recipe_of(run)
    if name not in OPTIONS:
        raise ValueError(f"{run / CONFIG} is of the recipe {name}: there are {', '.join(OPTIONS)}")
    options = OPTIONS[name](**read_options(run / CONFIG, name))
    if odd := [flag(option) for option in changes if not hasattr(options, option)]:
        raise ValueError(f"{', '.join(odd)} says nothing to the recipe {name}, which {run} is a run of")
    options = replace(options, partitions=partitions, plan=None, out=run, from_=None, resume=True, **changes)
    return RECIPES[name](options.settled(world.size if world.launched else None))


def _pipe_of(recipe: Recipe[Any], world: World, *, trains: bool) -> tuple[gpipe.GPipe, dict[str, Any]]:
    """The network of a run, with its weights; and how it is cut."""
    layers = build(recipe)
    load(read_weights(recipe.options.out), layers)
    model, sample = (layers, None) if trains else recipe.model(layers)
    return make_pipe(recipe, model, world, sample, measure=False)


@contextmanager
def opened(recipe: Recipe[Any], world: World) -> Iterator[gpipe.GPipe]:
    """Builds the network of a run, with its weights, in evaluation mode."""
    pipe, _ = _pipe_of(recipe, world, trains=False)
    with pipe, one_thread(), torch.no_grad(), precision(recipe.options, pipe.devices[0]):
        yield pipe.eval()


def evaluate_run(run: Path, partitions: int | None, changes: Mapping[str, Any], world: World) -> Evaluation:
    """Evaluates a run by its options, changed by what is not None, and writes evaluation.json into the folder."""
    given = {name: value for name, value in changes.items() if value is not None}
    recipe = open_recipe(run, partitions, world, **given)
    with opened(recipe, world) as pipe:
        found = recipe.evaluate(pipe)
    if not (run / WEIGHTS).is_file():
        unfinished = "the run has not ended: by the weights of its latest checkpoint, no average of them\n"
        found = replace(found, text=unfinished + found.text)
    if not world.rank:
        text = json.dumps({**found.numbers, **found.details}, indent=1, ensure_ascii=False)
        (run / EVALUATION).write_text(text + "\n", encoding="utf-8")
    return found


def spread(found: Sequence[Evaluation]) -> str:
    """The mean and the standard deviation of each number over several runs."""
    names = [name for name in found[0].numbers if all(name in one.numbers for one in found)]
    if not names:
        return f"{len(found)} runs, which have no number in common: give runs of one recipe"
    width = max(map(len, names))
    lines = [f"{len(found)} runs: mean and standard deviation"]
    for name in names:
        values = [one.numbers[name] for one in found]
        lines.append(f"{name:{width}}  {mean(values):.4f} +- {stdev(values):.4f}")
    return "\n".join(lines)


def record_run(run: Path, steps: int, partitions: int | None, world: World) -> str:
    """Trains a run for some steps more, which leave what crossed in `run`/messages.jsonl; gives that in words."""
    recipe = open_recipe(run, partitions, world, steps=steps)
    job = Job(recipe, *_pipe_of(recipe, world, trains=True), world)
    with job.pipe, one_thread(), gpipe.record(job.pipe, keep=steps) as recording:
        take_steps(job, islice(recipe.batches(1, 0, job.share), steps), job.progress.losses.append)
        messages = recording.messages()
        if not world.rank:
            recording.save(run / MESSAGES)
    said = []
    for kind in sorted({one.kind for one in messages}):
        sizes = [one.bytes for one in messages if one.kind == kind]
        said.append(f"{kind} {len(sizes)}, {sum(sizes) / 2**20:.2f} MiB")
    return f"{run / MESSAGES}: {len(messages)} messages of {len(recording.timelines)} steps: {'; '.join(said)}"


@contextmanager
def opened_translator(run: Path, partitions: int | None, width: int) -> Iterator[Translator]:
    """Gives what translates lines to English, by a beam of so many, as long as the run is open."""
    if (name := recipe_of(run)) != TranslationRecipe.name:
        raise ValueError(f"{run} is a run of the recipe {name}: give one of `gpipe train translation`")
    if not (run / VOCABULARY).is_file():
        raise ValueError(f"{run} has no {VOCABULARY}, which its network reads by: give a run that has all files")
    recipe = open_recipe(run, partitions, World(), tsv=None)  # what it was trained on need not be there
    assert isinstance(recipe, TranslationRecipe)
    with opened(recipe, World()) as pipe:
        vocabulary = recipe.vocabulary
        most = LONGEST * recipe.options.longest

        def to_english(lines: Sequence[str]) -> Iterator[str]:
            """Translates lines, up to the first that is too long; what is empty stays so."""
            sources = vocabulary.encode_all([line.strip() for line in lines])
            short = list(takewhile(lambda source: len(source) <= most, sources))
            said = [source for source in short if source]
            found = iter(recipe.translate(pipe, said, width))
            for source in short:
                yield " ".join(vocabulary.decode(next(found)).splitlines()) if source else ""
            if len(short) < len(sources):
                known = f"sentences of {recipe.options.longest} were trained on: give it in parts, of {most} at most"
                raise ValueError(f"it is {len(sources[len(short)])} subwords long, and {known}")

        yield to_english
