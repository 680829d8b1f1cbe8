"""Trains a job, shows how it goes, and leaves the files of its run."""

import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from safetensors.torch import save

import gpipe
from gpipe.profiling import Report, report_json
from gpipe.profiling.stored import NAME
from gpipe.recipes.options.files import to_table
from gpipe.recipes.options.training import OPTIONS
from gpipe.recipes.prepare import WEIGHTS, Epoch, Job, locked, one_thread, precision
from gpipe.recipes.recipe import Batch

ENDINGS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
METRICS = "metrics.jsonl"
AVERAGES = "averages"  # a folder, for the time of their writing
KEPT = 100  # steps that are recorded
TRACKIO_PROJECT = "gpipe"

T = TypeVar("T")
Say = Callable[[str], None]
Numbers = Mapping[str, float]


class Recorded(NamedTuple):
    """Of an epoch: its steps but the first, and the bytes that each rank here held in that at its peak, by use."""

    steps: gpipe.Recording
    held: tuple[Mapping[str, int], ...]


def watched(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Iterates over items, `total` or as many as they have; a terminal shows how far it is, and the time left."""
    console = Console(stderr=True)
    silent = not console.is_terminal or os.environ.get("RANK", "0") != "0"
    return iter(track(items, what, total, console=console, transient=True, disable=silent))


def run(job: Job, console: Console | None = None) -> list[Epoch]:
    """Trains, shows how it goes, and writes the files; the pipeline is closed afterwards.

    After Ctrl-C or SIGTERM it ends with status 130 or 143; what was done is saved.
    """
    console = console or Console(quiet=job.world.rank > 0)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with locked(job.options.out, job.world):
        with job.pipe, one_thread():
            with reporting(job) as report, gpipe.catch_sigterm(job.pipe, ctrl_c=True) as is_to_end:
                recorded = _train(job, say, console, is_to_end, report)
                if recorded is not None:
                    report({f"gpipe/{name}": value for name, value in recorded.steps.metrics().items()})
            weights = job.begin_save()()
            if job.recipe.averaging:
                with job.averages.applied():
                    weights = gpipe.save(job.options.out / AVERAGES, job.pipe).wait()
        if not job.world.rank:
            _write_files(job, say, weights, recorded)
    return job.progress.epochs


@contextmanager
def reporting(job: Job) -> Iterator[Callable[[Numbers], None]]:
    """Gives what reports numbers by name, as of the steps taken so far, to a tracker; only the first process does."""
    options, taken = job.options, job.pipe.step_number
    match None if job.world.rank else options.report_to:
        case "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(str(options.out / "tensorboard"), purge_step=taken + 1) as writer:

                def write(numbers: Numbers) -> None:
                    for name, value in numbers.items():
                        writer.add_scalar(name, value, job.pipe.step_number)

                yield write
        case "trackio":
            import trackio

            config, resume = to_table(job.recipe.name, options), "allow" if taken else "never"
            trackio.init(project=TRACKIO_PROJECT, name=str(options.out), config=config, resume=resume)
            try:
                yield lambda numbers: trackio.log(dict(numbers), step=job.pipe.step_number)
            finally:
                trackio.finish()
        case None:
            yield lambda numbers: None


def _train(
    job: Job, say: Say, console: Console, is_to_end: Callable[[], int], report: Callable[[Numbers], None]
) -> Recorded | None:
    """Trains what is left; gives what was recorded of the last epoch, if there is one left."""
    progress, recorded = job.progress, None
    if job.done:
        over = "" if len(progress.epochs) < job.epochs else ": all was trained before"
        say(f"goes on after {progress}, from {job.checkpoints}{over}")
    say(job.name)
    say(job.pipe.summary())
    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TimeRemainingColumn(), TextColumn("left")
    silent = not console.is_terminal or console.quiet  # never in a log
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        task = bar.add_task("", total=job.steps, completed=job.done)

        def step_ended(loss: float) -> None:
            bar.advance(task)
            report({"loss": loss})
            if ending := is_to_end():
                folder = job.begin_save()()
                again = f"gpipe train {job.recipe.name} --out {shlex.quote(str(job.options.out))} --resume"
                if job.recipe.name not in OPTIONS:
                    again = "the same options with resume=True"
                say(f"{ENDINGS[signal.Signals(ending)]}: saved to {folder}; go on by\n  {again}")
                raise SystemExit(128 + ending)

        _write_metrics(job)
        while len(progress.epochs) < job.epochs:
            epoch, recorded = _epoch(job, step_ended)
            progress.epochs.append(epoch)
            if len(progress.losses) == job.recipe.steps_per_epoch:
                progress.losses, progress.seconds = [], 0.0
            _write_metrics(job)
            held_out = {f"held_out/{name}": value for name, value in epoch.measured.items()}
            report({"epoch": epoch.epoch, "epoch_loss": epoch.loss, "epoch_seconds": epoch.seconds, **held_out})
            measured = [
                f"{name} {f'{value:.2%}' if name == 'accuracy' else f'{value:.4f}'}"
                for name, value in epoch.measured.items()
            ]  # nothing in it depends on the number of partitions
            head = f"epoch {epoch.epoch:{len(str(job.epochs))}}/{job.epochs}"
            say(f"{head}  loss {epoch.loss:<10.6g}  held-out {', '.join(measured)}")
            if epoch.epoch % job.options.checkpoint_every == 0 and epoch.epoch < job.epochs:
                job.begin_save()
    return recorded


def _epoch(job: Job, step_ended: Callable[[float], None]) -> tuple[Epoch, Recorded | None]:
    """Trains and evaluates the next epoch, or what is left of it; the last one is recorded."""
    progress, number = job.progress, len(job.progress.epochs) + 1
    first, start = len(progress.losses), time.perf_counter() - progress.seconds
    left, recording, watching = job.steps_of(number) - first, None, None

    def after_step(loss: float) -> None:
        progress.losses.append(loss)
        progress.seconds = time.perf_counter() - start
        if watching is not None:
            watching.stop()
        step_ended(loss)

    batches: Iterator[Batch] = islice(job.recipe.batches(number, first, job.share), left)
    with ExitStack() as stack:
        if number == job.epochs and left > 0:
            recording = stack.enter_context(gpipe.record(job.pipe, keep=min(left, KEPT)))
            watching = stack.enter_context(gpipe.record(job.pipe, memory=True)) if left > 1 else None
            batches = recording.loading(batches)
        take_steps(job, batches, after_step)
    with job.averages.applied(), precision(job.options, job.pipe.devices[0]):
        job.pipe.eval()
        measured = job.recipe.measure(job.pipe)
    loss = sum(progress.losses) / len(progress.losses)
    epoch = Epoch(number, loss, dict(measured), time.perf_counter() - start)
    held = watching.report("").memory if watching else ()
    return epoch, None if recording is None else Recorded(recording, held)


def take_steps(job: Job, batches: Iterable[Batch], after_step: Callable[[float], None]) -> None:
    """Takes a step for each mini-batch, and hands its loss to `after_step`, which adds it to the progress."""
    job.pipe.train()
    for batch in batches:
        step = job.done
        job.recipe.before_step(job.pipe, step, job.steps)
        with precision(job.options, job.pipe.devices[0]):
            loss = job.pipe.step(batch.inputs, batch.targets, job.recipe.loss, reduction=job.recipe.reduction)
        if job.recipe.largest_norm:
            job.pipe.clip_grad_norm_(job.recipe.largest_norm)
        for group in job.optimizer.param_groups:
            group["lr"] = job.recipe.learning_rate_at(step, job.steps)
        job.optimizer.step()
        job.averages.update(step)
        job.optimizer.zero_grad()
        after_step(loss.item())


def _write_metrics(job: Job) -> None:
    if not job.world.rank:
        lines = [json.dumps(epoch.line()) + "\n" for epoch in job.progress.epochs]
        (job.options.out / METRICS).write_text("".join(lines))


def _write_files(job: Job, say: Say, checkpoint: Path, recorded: Recorded | None) -> None:
    """Writes weights under unpartitioned names, the typical step as a picture, all as a trace and as a report."""
    out = job.options.out
    state = gpipe.load(checkpoint).state_dict()
    weights = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    (out / WEIGHTS).write_bytes(save(weights))
    if job.recipe.averaging:
        shutil.rmtree(out / AVERAGES)
    if recorded is not None:
        recorded.steps.save(out / "timeline.svg")
        recorded.steps.save(out / "trace.json")
        (out / NAME).write_text(report_json(_report(job, recorded)), encoding="utf-8")
        say("\n".join(_told(recorded, out)))


def _told(recorded: Recorded, out: Path) -> Iterator[str]:
    """Where the time of the recorded steps went, and what to change."""
    recording = recorded.steps
    ranks = recording.timelines[0].ranks
    own = median(timeline.seconds for timeline in recording.timelines)
    in_turn = median(sum(map(step.busy, range(ranks))) for step in recording.timelines)
    yield f"\nWhere a step's time went, in the last epoch:\n{recording}\n"
    yield f"forward and backward, pipelined       {own * 1000:8.1f} ms"
    yield f"one partition after another (naive)   {in_turn * 1000:8.1f} ms: {in_turn / own:.2f} x"
    if totals := [sum(parts.values()) / 2**20 for parts in recorded.held]:
        share = f"{max(totals):.1f} of {sum(totals):.1f} MiB, {max(totals) / sum(totals):.0%}"
        yield f"weights, gradients, optimizer, activations: {share} in the largest partition"
    yield f"\n{out}: metrics.jsonl, model.safetensors, timeline.svg, trace.json (for ui.perfetto.dev), report.json"
    yield f"a page of all this, for a browser: gpipe report {shlex.quote(str(out))}"
    yield f"\n{recording.explain()}"


def _report(job: Job, recorded: Recorded) -> Report:
    settings = {name.replace("_", " ").strip(): value for name, value in {**vars(job.options), **job.how}.items()}
    settings |= {
        "partitions": job.pipe.partitions,
        "layers of each stage": job.pipe.layers_per_partition,
        "devices": list(dict.fromkeys(job.pipe.devices)),
        "torch": torch.__version__,
    }
    for name, value in settings.items():
        if isinstance(value, list | tuple):
            settings[name] = ", ".join(map(str, value))
        elif isinstance(value, Path):
            settings[name] = str(value)
    return replace(
        recorded.steps.report(job.name),
        memory=recorded.held,
        configuration=settings,
        losses=tuple(epoch.loss for epoch in job.progress.epochs),
        loss_each="epoch",
    )
