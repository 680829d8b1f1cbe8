"""From options to a job: builds the network and its pipe, and goes back to where the run was."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import gpipe
from gpipe.recipes.files import EVALUATION, WEIGHTS, one_thread
from gpipe.recipes.job import CHECKPOINTS, Job, Progress, from_extra, locked, parts_of, replicas_of
from gpipe.recipes.learning import Averages
from gpipe.recipes.options.files import write_config
from gpipe.recipes.options.training import TrainOptions
from gpipe.recipes.recipe import Recipe
from gpipe.recipes.world import World, find_world, of_first


def prepare(recipe: Recipe[Any], costs: Sequence[float] | None = None, world: World | None = None) -> Job:
    """Builds the network and its pipeline, and goes back to where the run was.

    Args:
        recipe: What is trained, with options that are settled for the processes.
        costs: What each layer costs; by default its time is measured.
        world: The processes that train together; by default this one alone.

    Raises:
        ValueError: The options cannot be, or the checkpoint does not fit them: what to do, a line for each. Or
            another training writes into the folder.
        OSError: The folder cannot be made.
    """
    if world is None and find_world(os.environ).launched:
        raise ValueError(
            "torchrun has started this process among others: give prepare the world, from find_world(os.environ), "
            "within joined(world)"
        )
    world, options = world or World(), recipe.options
    layers = build(recipe)
    begun = options.resume and gpipe.find_checkpoint(options.out / CHECKPOINTS) is not None
    if options.resume and not begun and (options.out / WEIGHTS).is_file():
        raise ValueError(
            f"{options.out} has the weights of a run and no checkpoint to go on from: leave --resume out to begin "
            f"anew, or start from them by --from {options.out} in another folder"
        )
    if options.from_ is not None and not begun:
        recipe.fit(read_weights(options.from_), layers)
    pipe, how = make_pipe(recipe, layers, costs, world)
    _make_folder(options.out)
    optimizer = recipe.optimizer(pipe.parameters())
    with locked(options.out, world):
        job = Job(recipe, pipe, optimizer, Averages(optimizer, recipe.averaging), Progress(), world, how)
        job = replace(job, progress=_begin(job))
        if not world.rank:
            write_config(options.out, recipe.name, options)
            recipe.write(options.out)
    return job


def build(recipe: Recipe[Any]) -> list[nn.Module]:
    """The layers, with the weights that the seed gives them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.options.seed)
        return recipe.layers()


def read_weights(run: Path) -> Mapping[str, Any]:
    """The weights of a run: those that it ended with, or its latest checkpoint's.

    Raises:
        ValueError: It has neither.
    """
    if (run / WEIGHTS).is_file():
        try:
            return load_file(run / WEIGHTS)
        except SafetensorError as error:
            raise ValueError(f"{run / WEIGHTS} cannot be read: {error}; train again, or bring it back") from None
    if gpipe.find_checkpoint(run / CHECKPOINTS) is None:
        raise ValueError(f"{run} has neither {WEIGHTS} nor a checkpoint: give the folder of a run that was trained")
    return gpipe.load(run / CHECKPOINTS).state_dict()


def make_pipe(
    recipe: Recipe[Any], layers: list[nn.Module], costs: Sequence[float] | None, world: World
) -> tuple[gpipe.GPipe, dict[str, Any]]:
    """Cuts the layers as the options say; gives that beside the pipe."""
    options: TrainOptions = recipe.options
    assert options.partitions is not None
    replicas = replicas_of(options.partitions, world)
    sample = None if costs and options.plan is None else recipe.sample(replicas).inputs
    how = _how(options, layers, sample, world)
    pipe = gpipe.GPipe(
        layers,
        micro_batches=options.micro_batches // replicas,
        costs=costs,
        sample=None if costs else sample,
        seed=options.seed,
        intra_op_threads=1,
        driver="process" if world.launched else None,
        **how,
    )
    return pipe, how


def _how(options: TrainOptions, layers: Sequence[nn.Module], sample: Any, world: World) -> dict[str, Any]:
    """The partitions, and what is done in which order: as the options say, or as is fastest on this machine."""
    assert options.partitions is not None
    if options.plan is None:
        return {"partitions": options.partitions, "schedule": options.schedule, "remat": options.remat}
    k, m = options.partitions, options.micro_batches // replicas_of(options.partitions, world)

    def found() -> gpipe.Plan:
        return gpipe.find_plan(layers, _even(sample, m), k, partitions=k, micro_batches=m, measure=True)

    with one_thread():
        return dict(of_first(world, lambda: parts_of(found()))) if world.launched else {"plan": found()}


def _even(sample: Any, parts: int) -> Any:
    """Rows of a sample, or of each of a tuple, so many that they make equal parts.

    >>> _even(torch.arange(7), 3), _even(torch.arange(2), 3)
    (tensor([0, 1, 2, 3, 4, 5]), tensor([0, 1, 0]))
    """
    if not isinstance(sample, Tensor):
        return tuple(_even(one, parts) for one in sample)
    rows = len(sample)
    return sample[torch.arange(max(parts, rows - rows % parts)) % rows]


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out is {out}, which cannot be made: {error.strerror}; choose another folder") from None


def _begin(job: Job) -> Progress:
    """Goes back to the latest checkpoint if that is wanted, and there is one; else puts those of earlier runs aside.

    Rank 0 looks, so that all do the same.
    """
    wanted = job.options.resume or job.world.restarts > 0
    found = wanted and not job.world.rank and gpipe.find_checkpoint(job.checkpoints) is not None
    if any(job.pipe.exchange(b"found" if found else b"")):
        extra = gpipe.load(job.checkpoints, job.pipe, job.optimizer).extra
        progress = from_extra(extra, job.options, job.recipe.data)
        done = len(progress.epochs) * job.recipe.steps_per_epoch + len(progress.losses)
        if done > job.steps:
            raise ValueError(
                f"{done} steps were trained before, and this is a training of {job.steps}: give as many or more by "
                "--steps or --epochs, or start anew without --resume"
            )
        return progress
    if not job.world.rank:
        for name in (WEIGHTS, EVALUATION):
            (job.options.out / name).unlink(missing_ok=True)
        if job.checkpoints.exists():
            old = job.checkpoints.with_suffix(".old")
            shutil.rmtree(old, ignore_errors=True)
            job.checkpoints.rename(old)
    return Progress()
