"""Records what crosses between the processes that train the network of a run."""

from collections import Counter
from pathlib import Path

import gpipe
from gpipe.recipes.job import Job, Progress
from gpipe.recipes.learning import Averages
from gpipe.recipes.plain import one_thread
from gpipe.recipes.prepare import build, make_pipe, read_weights
from gpipe.recipes.recipe import load
from gpipe.recipes.trained import open_recipe
from gpipe.recipes.training import train_epoch
from gpipe.recipes.world import World

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
