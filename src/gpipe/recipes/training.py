"""Trains a job, shows how it goes, and leaves the files of its run."""

import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from rich.console import Console

import gpipe
from gpipe.recipes.display import Display, Recorded
from gpipe.recipes.files import AVERAGES, one_thread, write_files, write_metrics
from gpipe.recipes.job import Epoch, Job, locked
from gpipe.recipes.options.files import OPTIONS
from gpipe.recipes.recipe import Batch

ENDINGS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


def run(job: Job, console: Console | None = None) -> list[Epoch]:
    """Trains, shows how it goes, and writes the files; the pipeline is closed afterwards.

    Raises:
        ValueError: Another training writes into the folder.
        SystemExit: After Ctrl-C or SIGTERM, with status 130 or 143; what was done is saved.
    """
    display = Display(console or Console(quiet=job.world.rank > 0), job.epochs, job.steps)
    with locked(job.options.out, job.world):
        with job.pipe, one_thread():
            with gpipe.catch_sigterm(job.pipe, ctrl_c=True) as is_to_end:
                recorded = _train(job, display, is_to_end)
            weights = job.begin_save()()
            if job.recipe.averaging:
                with job.averages.applied():
                    weights = gpipe.save(job.options.out / AVERAGES, job.pipe).wait()
        if not job.world.rank:
            write_files(job, display, weights, recorded)
    return job.progress.epochs


def _train(job: Job, display: Display, is_to_end: Callable[[], int]) -> Recorded | None:
    """Trains what is left; gives what was recorded of the last epoch, if there is one left."""
    progress, recorded = job.progress, None
    if progress.epochs or progress.losses:
        over = "" if len(progress.epochs) < job.epochs else ": all was trained before"
        display.say(f"goes on after {progress}, from {job.checkpoints}{over}")
    write_metrics(job)
    done = len(progress.epochs) * job.recipe.steps_per_epoch + len(progress.losses)
    with display.training(job.name, job.pipe, done):
        while len(progress.epochs) < job.epochs:
            epoch, recorded = _epoch(job, display, is_to_end)
            progress.epochs.append(epoch)
            if len(progress.losses) == job.recipe.steps_per_epoch:
                progress.losses, progress.seconds = [], 0.0
            write_metrics(job)
            display.epoch_ended(epoch)
            if epoch.epoch % job.options.checkpoint_every == 0 and epoch.epoch < job.epochs:
                job.begin_save()
    return recorded


def _epoch(job: Job, display: Display, is_to_end: Callable[[], int]) -> tuple[Epoch, Recorded | None]:
    """Trains and evaluates the next epoch, or what is left of it; the last one is recorded."""
    progress, number = job.progress, len(job.progress.epochs) + 1
    first, start = len(progress.losses), time.perf_counter() - progress.seconds
    steps, last = job.steps_of(number), number == job.epochs

    def after_step(loss: float) -> None:
        progress.losses.append(loss)
        progress.seconds = time.perf_counter() - start
        display.step_ended()
        if ending := is_to_end():
            _end(job, display, signal.Signals(ending))

    with Recorded.of(job.pipe, steps - first) if last and first < steps else nullcontext() as recorded:
        batches = zip(range(first, steps), job.recipe.batches(number, first, job.share), strict=False)
        given: Iterator[tuple[int, Batch]] = batches if recorded is None else recorded.loading(batches)
        train_epoch(job, number, given, after_step)
    with job.averages.applied(), job.precision:
        job.pipe.eval()
        measured = job.recipe.measure(job.pipe)
    loss = sum(progress.losses) / len(progress.losses)
    return Epoch(number, loss, dict(measured), time.perf_counter() - start), recorded


def train_epoch(
    job: Job, epoch: int, batches: Iterator[tuple[int, Batch]], after_step: Callable[[float], None]
) -> None:
    """Takes a step for each mini-batch of an epoch, and hands its loss to `after_step`."""
    job.pipe.train()
    before = (epoch - 1) * job.recipe.steps_per_epoch
    for number, batch in batches:
        step = before + number
        job.recipe.before_step(job.pipe, step, job.steps)
        with job.precision:
            loss = job.pipe.step(batch.inputs, batch.targets, job.recipe.loss, reduction=job.recipe.reduction)
        if job.recipe.largest_norm:
            job.pipe.clip_grad_norm_(job.recipe.largest_norm)
        for group in job.optimizer.param_groups:
            group["lr"] = job.recipe.learning_rate_at(step, job.steps)
        job.optimizer.step()
        job.averages.update(step)
        job.optimizer.zero_grad()
        after_step(loss.item())


def _end(job: Job, display: Display, ending: signal.Signals) -> None:
    """Saves, says how to go on, and ends the process."""
    folder = job.begin_save()()
    again = f"gpipe train {job.recipe.name} --out {shlex.quote(str(job.options.out))} --resume"
    if job.recipe.name not in OPTIONS:
        again = "the same options with resume=True"
    display.say(f"{ENDINGS[ending]}: saved to {folder}; go on by\n  {again}")
    raise SystemExit(128 + ending)
