"""Trains a job, prints its progress and writes the files of its run."""

import json
import os
import shlex
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
from safetensors.torch import load, save
from torch import Tensor

import gpipe
from gpipe.profiling import Report, report_json
from gpipe.profiling.stored import NAME
from gpipe.recipes.options.files import to_table
from gpipe.recipes.options.training import OPTIONS
from gpipe.recipes.prepare import WEIGHTS, Epoch, Job, locked, one_thread, precision
from gpipe.recipes.recipe import Batch

ENDINGS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
METRICS = "metrics.jsonl"
RECORDED_STEPS = 100
TRACKIO_PROJECT = "gpipe"

T = TypeVar("T")
Say = Callable[[str], None]
Numbers = Mapping[str, float]


class RecordedEpoch(NamedTuple):
    """The measurements of one epoch.

    Attributes:
        steps: The recorded steps, without the first step of the epoch.
        memory: Peak memory of the first step for each rank in this process, in bytes by purpose.
    """

    steps: gpipe.Recording
    memory: tuple[Mapping[str, int], ...]


def with_progress(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """Iterates over items and, in a terminal, shows a progress bar. Default total: `len(items)`."""
    console = Console(stderr=True)
    silent = not console.is_terminal or os.environ.get("RANK", "0") != "0"
    return iter(track(items, title, total, console=console, transient=True, disable=silent))


def run(job: Job, console: Console | None = None) -> list[Epoch]:
    """Trains a job, prints its progress, writes the files of the run and closes the pipe.

    After Ctrl-C or SIGTERM, saves a checkpoint at the end of the step and exits with status 130 or 143.

    Args:
        job: The job.
        console: Where to print. Default: standard output of rank 0.

    Returns:
        The results of all epochs, including epochs before the run was resumed.
    """
    console = console or Console(quiet=job.world.rank > 0)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with locked(job.options.out, job.world):
        with job.pipe, one_thread():
            with open_tracker(job) as report, gpipe.catch_sigterm(job.pipe, ctrl_c=True) as received_signal:
                recorded = _train(job, say, console, received_signal, report)
                if recorded is not None:
                    report({f"gpipe/{name}": value for name, value in recorded.steps.metrics().items()})
            job.begin_save()()
            with job.averages.applied():
                weights = gather_weights(job.pipe, job.world.rank)
        if not job.world.rank:
            _write_files(job, say, weights, recorded)
    return job.progress.epochs


@contextmanager
def open_tracker(job: Job) -> Iterator[Callable[[Numbers], None]]:
    """Opens the experiment tracker of --report-to, and yields a function that logs metrics for the current step.

    Only rank 0 logs. In other processes, or without --report-to, the function does nothing.
    """
    options, step = job.options, job.pipe.step_number
    match None if job.world.rank else options.report_to:
        case "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(str(options.out / "tensorboard"), purge_step=step + 1) as writer:

                def write(numbers: Numbers) -> None:
                    for name, value in numbers.items():
                        writer.add_scalar(name, value, job.pipe.step_number)

                yield write
        case "trackio":
            import trackio

            config, resume = to_table(job.recipe.name, options), "allow" if step else "never"
            trackio.init(project=TRACKIO_PROJECT, name=str(options.out), config=config, resume=resume)
            try:
                yield lambda numbers: trackio.log(dict(numbers), step=job.pipe.step_number)
            finally:
                trackio.finish()
        case None:
            yield lambda numbers: None


def _train(
    job: Job, say: Say, console: Console, received_signal: Callable[[], int], report: Callable[[Numbers], None]
) -> RecordedEpoch | None:
    """Trains the remaining epochs. Returns the measurements of the last epoch, or None if no epoch remained."""
    progress, recorded = job.progress, None
    if job.done:
        finished = "" if len(progress.epochs) < job.epochs else ". Training has already finished."
        say(f"Resuming after {progress} from {job.checkpoints}{finished}")
    elif job.options.resume:
        say(f"--resume: {job.checkpoints} contains no checkpoint. Training starts from the beginning.")
    say(job.name)
    say(job.pipe.summary())
    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TimeRemainingColumn(), TextColumn("left")
    silent = not console.is_terminal or console.quiet  # A progress bar would clutter log files.
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        task = bar.add_task("", total=job.steps, completed=job.done)

        def step_ended(loss: float) -> None:
            bar.advance(task)
            report({"loss": loss})
            if number := received_signal():
                folder = job.begin_save()()
                command = f"gpipe train {job.recipe.name} --out {shlex.quote(str(job.options.out))} --resume"
                if job.recipe.name not in OPTIONS:
                    command = "the same options and resume=True"
                say(f"{ENDINGS[signal.Signals(number)]}: saved a checkpoint to {folder}. Resume with\n  {command}")
                raise SystemExit(128 + number)

        _write_metrics(job)
        while len(progress.epochs) < job.epochs:
            epoch, recorded = _train_epoch(job, step_ended)
            progress.epochs.append(epoch)
            if len(progress.losses) == job.recipe.steps_per_epoch:
                progress.losses, progress.seconds = [], 0.0
            _write_metrics(job)
            held_out = {f"held_out/{name}": value for name, value in epoch.measured.items()}
            report({"epoch": epoch.epoch, "epoch_loss": epoch.loss, "epoch_seconds": epoch.seconds, **held_out})
            measured = [
                f"{name} {f'{value:.2%}' if name == 'accuracy' else f'{value:.4f}'}"
                for name, value in epoch.measured.items()
            ]
            head = f"epoch {epoch.epoch:{len(str(job.epochs))}}/{job.epochs}"
            say(f"{head}  loss {epoch.loss:<10.6g}  held-out {', '.join(measured)}")
            if epoch.epoch % job.options.checkpoint_every == 0 and epoch.epoch < job.epochs:
                job.begin_save()
    return recorded


def _train_epoch(job: Job, step_ended: Callable[[float], None]) -> tuple[Epoch, RecordedEpoch | None]:
    """Trains the remaining steps of the next epoch, and evaluates the model. The last epoch is recorded."""
    progress, number = job.progress, len(job.progress.epochs) + 1
    first, start = len(progress.losses), time.perf_counter() - progress.seconds
    remaining, recording, memory_recording = job.steps_of(number) - first, None, None

    def after_step(loss: float) -> None:
        progress.losses.append(loss)
        progress.seconds = time.perf_counter() - start
        if memory_recording is not None:  # Recording memory makes steps slower, so it ends after the first one.
            memory_recording.stop()
        step_ended(loss)

    batches: Iterator[Batch] = islice(job.recipe.batches(number, first, job.share), remaining)
    with ExitStack() as stack:
        if number == job.epochs and remaining > 0:
            recording = stack.enter_context(gpipe.record(job.pipe, keep=min(remaining, RECORDED_STEPS)))
            if remaining > 1:
                memory_recording = stack.enter_context(gpipe.record(job.pipe, memory=True))
            batches = recording.loading(batches)
        take_steps(job, batches, after_step)
    with job.averages.applied(), precision(job.options, job.pipe.devices[0]):
        job.pipe.eval()
        measured = job.recipe.measure(job.pipe)
    loss = sum(progress.losses) / len(progress.losses)
    epoch = Epoch(number, loss, dict(measured), time.perf_counter() - start)
    memory = memory_recording.report("").memory if memory_recording else ()
    return epoch, None if recording is None else RecordedEpoch(recording, memory)


def take_steps(job: Job, batches: Iterable[Batch], after_step: Callable[[float], None]) -> None:
    """Trains on the mini-batches.

    Passes the loss of each step to `after_step`, which adds the loss to the progress.
    """
    job.pipe.train()
    for batch in batches:
        step = job.done
        job.recipe.before_step(job.pipe, step, job.steps)
        with precision(job.options, job.pipe.devices[0]):
            loss = job.pipe.step(batch.inputs, batch.targets, job.recipe.loss, reduction=job.recipe.reduction)
        if job.recipe.max_norm:
            job.pipe.clip_grad_norm_(job.recipe.max_norm)
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


def gather_weights(pipe: gpipe.GPipe, rank: int) -> dict[str, Tensor]:
    """Returns the weights with the names of the unsplit layers on rank 0, and an empty dict on all other ranks.

    Every process must call this function. Weights travel one at a time, so other ranks need memory for one of them.
    """
    own, whole = pipe.state_dict() if rank < pipe.partitions else {}, dict[str, Tensor]()
    names = [json.loads(message) for message in pipe.exchange(json.dumps(list(own)).encode())]
    for holder, name in [(holder, name) for holder, each in enumerate(names) for name in each]:
        message = b""
        if holder == rank:
            message = save({name: own[name].cpu().clone(memory_format=torch.contiguous_format)})
        message = pipe.exchange(message)[holder]
        if not rank:
            whole |= load(message)
    return whole


def _write_files(job: Job, say: Say, weights: dict[str, Tensor], recorded: RecordedEpoch | None) -> None:
    """Writes the final weights, a picture of the median step, a trace and a report."""
    out = job.options.out
    (out / WEIGHTS).write_bytes(save(weights))
    if recorded is not None:
        recorded.steps.save(out / "timeline.svg")
        recorded.steps.save(out / "trace.json")
        (out / NAME).write_text(report_json(_report(job, recorded)), encoding="utf-8")
        say("\n".join(_summary(recorded, out)))


def _summary(recorded: RecordedEpoch, out: Path) -> Iterator[str]:
    """Yields lines that show where the time of the recorded steps went, and how to make the steps faster."""
    recording = recorded.steps
    ranks = recording.timelines[0].ranks
    pipelined = median(timeline.seconds for timeline in recording.timelines)
    sequential = median(sum(map(step.busy, range(ranks))) for step in recording.timelines)
    yield f"\nWhere the time of a step went, in the last epoch:\n{recording}\n"
    yield f"forward and backward, pipelined       {pipelined * 1000:8.1f} ms"
    yield f"one partition after the other         {sequential * 1000:8.1f} ms: {sequential / pipelined:.2f} x"
    if totals := [sum(uses.values()) / 2**20 for uses in recorded.memory]:
        share = f"{max(totals):.1f} of {sum(totals):.1f} MiB ({max(totals) / sum(totals):.0%})"
        yield f"The largest partition holds {share} of weights, gradients, optimizer state and activations."
    yield f"\n{out}: metrics.jsonl, model.safetensors, timeline.svg, trace.json (for ui.perfetto.dev), report.json"
    yield f"To see all results in a browser: gpipe report {shlex.quote(str(out))}"
    yield f"\n{recording.explain()}"


def _report(job: Job, recorded: RecordedEpoch) -> Report:
    values = {**vars(job.options), **job.settings}
    if job.options.steps is not None:
        del values["epochs"]  # --steps overrides --epochs.
    settings = {name.replace("_", " ").strip(): value for name, value in values.items() if value not in (None, ())}
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
        memory=recorded.memory,
        configuration=settings,
        losses=tuple(epoch.loss for epoch in job.progress.epochs),
        loss_each="epoch",
    )
