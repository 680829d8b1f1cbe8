"""Opens a finished or unfinished run of `gpipe train`, to evaluate its model, record steps, or translate."""

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
from gpipe.recipes.options.training import OPTIONS
from gpipe.recipes.prepare import EVALUATION, WEIGHTS, Job, build, make_pipe, one_thread, precision, read_weights
from gpipe.recipes.recipe import Evaluation, Recipe, load
from gpipe.recipes.training import take_steps
from gpipe.recipes.translation.recipe import VOCABULARY, TranslationRecipe
from gpipe.recipes.world import World

RECIPES: dict[str, type[Recipe[Any]]] = {cls.name: cls for cls in (DigitsRecipe, ImagesRecipe, TranslationRecipe)}
MESSAGES = "messages.jsonl"
LONGEST = 4  # Longest sentence to translate, relative to the longest sentence of the training.
Translator = Callable[[Sequence[str]], Iterator[str]]


def open_recipe(run: Path, partitions: int | None, world: World, **changes: Any) -> Recipe[Any]:
    """Returns the recipe of a run with the saved options, except for the number of partitions and for `changes`."""
    name = recipe_of(run)
    if name not in OPTIONS:
        raise ValueError(
            f"{run / CONFIG}: {name} is not a recipe of gpipe. Pass a run of one of {', '.join(OPTIONS)}."
        )
    options = OPTIONS[name](**read_options(run / CONFIG, name))
    for option in changes:
        if not hasattr(options, option):
            raise ValueError(f"--{option}: {run} is a run of the recipe {name}, which has no such option. Remove it.")
    options = replace(options, partitions=partitions, plan=None, out=run, from_=None, resume=True, **changes)
    return RECIPES[name](options.resolved(world.size if world.launched else None))


def _load_pipe(recipe: Recipe[Any], world: World, *, trains: bool) -> tuple[gpipe.GPipe, dict[str, Any]]:
    """Returns the pipe of a run with its weights, and its partitions, schedule and recomputation as plain values."""
    layers = build(recipe)
    load(read_weights(recipe.options.out), layers)
    model, sample = (layers, None) if trains else recipe.model(layers)
    return make_pipe(recipe, model, world, sample, measure=False)


@contextmanager
def opened(recipe: Recipe[Any], world: World) -> Iterator[gpipe.GPipe]:
    """Opens the pipe of a run with its weights, in evaluation mode."""
    pipe, _ = _load_pipe(recipe, world, trains=False)
    with pipe, one_thread(), torch.no_grad(), precision(recipe.options, pipe.devices[0]):
        yield pipe.eval()


def evaluate_run(run: Path, partitions: int | None, changes: Mapping[str, Any], world: World) -> Evaluation:
    """Evaluates a run and writes evaluation.json. `changes` that are not None replace the options of the run."""
    changes = {name: value for name, value in changes.items() if value is not None}
    recipe = open_recipe(run, partitions, world, **changes)
    with opened(recipe, world) as pipe:
        evaluation = recipe.evaluate(pipe)
    if not (run / WEIGHTS).is_file():
        note = "Training has not finished. Using the weights of the latest checkpoint, without averaging.\n"
        evaluation = replace(evaluation, text=note + evaluation.text)
    if not world.rank:
        text = json.dumps({**evaluation.numbers, **evaluation.details}, indent=1, ensure_ascii=False)
        (run / EVALUATION).write_text(text + "\n", encoding="utf-8")
    return evaluation


def spread(evaluations: Sequence[Evaluation]) -> str:
    """Formats the mean and the standard deviation of each metric over several runs."""
    runs = [evaluation.numbers for evaluation in evaluations]
    names = [name for name in runs[0] if all(name in numbers for numbers in runs)]
    if not names:
        return f"The {len(runs)} runs have no metric in common. Pass runs of the same recipe."
    width = max(map(len, names))
    lines = [f"{len(runs)} runs: mean and standard deviation"]
    for name in names:
        values = [numbers[name] for numbers in runs]
        lines.append(f"{name:{width}}  {mean(values):.4f} +- {stdev(values):.4f}")
    return "\n".join(lines)


def record_run(run: Path, steps: int, partitions: int | None, world: World) -> str:
    """Trains a few more steps without saving the weights.

    Writes messages.jsonl and returns a summary of the messages.
    """
    recipe = open_recipe(run, partitions, world, steps=steps)
    job = Job(recipe, *_load_pipe(recipe, world, trains=True), world)
    with job.pipe, one_thread(), gpipe.record(job.pipe, keep=steps) as recording:
        take_steps(job, islice(recipe.batches(1, 0, job.share), steps), job.progress.losses.append)
        messages = recording.messages()
        if not world.rank:
            recording.save(run / MESSAGES)
    totals = []
    for kind in sorted({message.kind for message in messages}):
        sizes = [message.bytes for message in messages if message.kind == kind]
        totals.append(f"{kind} {len(sizes)}, {sum(sizes) / 2**20:.2f} MiB")
    return f"{run / MESSAGES}: {len(messages)} messages of {len(recording.timelines)} steps: {'; '.join(totals)}"


@contextmanager
def opened_translator(run: Path, partitions: int | None, width: int) -> Iterator[Translator]:
    """Opens a run, and yields a function that translates lines to English by a beam search of this width."""
    if (name := recipe_of(run)) != TranslationRecipe.name:
        raise ValueError(f"--run: {run} is a run of the recipe {name}. Pass a run of `gpipe train translation`.")
    if not (run / VOCABULARY).is_file():
        raise ValueError(f"--run: {run} contains no {VOCABULARY}. Pass the complete folder of a run.")
    recipe = open_recipe(run, partitions, World(), tsv=None)  # The training data may no longer exist.
    assert isinstance(recipe, TranslationRecipe)
    with opened(recipe, World()) as pipe:
        vocabulary = recipe.vocabulary
        limit = LONGEST * recipe.options.longest

        def to_english(lines: Sequence[str]) -> Iterator[str]:
            """Translates lines, and raises an error at the first line that is too long. Empty lines stay empty."""
            sources = vocabulary.encode_all([line.strip() for line in lines])
            short = list(takewhile(lambda source: len(source) <= limit, sources))
            translations = iter(recipe.translate(pipe, [source for source in short if source], width))
            for source in short:
                yield " ".join(vocabulary.decode(next(translations)).splitlines()) if source else ""
            if len(short) < len(sources):
                raise ValueError(
                    f"the sentence has {len(sources[len(short)])} tokens, and training sentences had at most "
                    f"{recipe.options.longest}. Split the sentence into parts with at most {limit} tokens."
                )

        yield to_english
