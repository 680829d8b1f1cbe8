"""Trains a job, shows how it goes, and leaves the files of its run."""

import json
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save
from torch import Tensor

import gpipe
from gpipe.profiling import Report, report_json
from gpipe.profiling.stored import NAME
from gpipe.recipes.display import Display, Recorded
from gpipe.recipes.options.files import OPTIONS
from gpipe.recipes.prepare import WEIGHTS, Epoch, Job, locked, one_thread, precision
from gpipe.recipes.recipe import Batch, Recipe

ENDINGS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
METRICS = "metrics.jsonl"
AVERAGES = "averages"  # a folder, for the time of their writing
COMPARED = 2**27  # parameters, above which the plain loop, which needs all of them once more, is not timed
REPEATS = 3  # of the plain loop, and one before them to warm up


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
            _write_files(job, display, weights, recorded)
    return job.progress.epochs


def _train(job: Job, display: Display, is_to_end: Callable[[], int]) -> Recorded | None:
    """Trains what is left; gives what was recorded of the last epoch, if there is one left."""
    progress, recorded = job.progress, None
    if job.done:
        over = "" if len(progress.epochs) < job.epochs else ": all was trained before"
        display.say(f"goes on after {progress}, from {job.checkpoints}{over}")
    _write_metrics(job)
    with display.training(job.name, job.pipe, job.done):
        while len(progress.epochs) < job.epochs:
            epoch, recorded = _epoch(job, display, is_to_end)
            progress.epochs.append(epoch)
            if len(progress.losses) == job.recipe.steps_per_epoch:
                progress.losses, progress.seconds = [], 0.0
            _write_metrics(job)
            display.epoch_ended(epoch)
            if epoch.epoch % job.options.checkpoint_every == 0 and epoch.epoch < job.epochs:
                job.begin_save()
    return recorded


def _epoch(job: Job, display: Display, is_to_end: Callable[[], int]) -> tuple[Epoch, Recorded | None]:
    """Trains and evaluates the next epoch, or what is left of it; the last one is recorded."""
    progress, number = job.progress, len(job.progress.epochs) + 1
    first, start = len(progress.losses), time.perf_counter() - progress.seconds
    steps, recorded = job.steps_of(number), None

    def after_step(loss: float) -> None:
        progress.losses.append(loss)
        progress.seconds = time.perf_counter() - start
        display.step_ended()
        if ending := is_to_end():
            _end(job, display, signal.Signals(ending))

    batches: Iterator[tuple[int, Batch]]
    batches = zip(range(first, steps), job.recipe.batches(number, first, job.share), strict=False)
    if number == job.epochs and first < steps:
        recorded = Recorded(job.pipe, steps - first)
        batches = recorded.loading(batches)
    train_epoch(job, number, batches, after_step)
    with job.averages.applied(), precision(job.options, job.pipe.devices[0]):
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


def _end(job: Job, display: Display, ending: signal.Signals) -> None:
    """Saves, says how to go on, and ends the process."""
    folder = job.begin_save()()
    again = f"gpipe train {job.recipe.name} --out {shlex.quote(str(job.options.out))} --resume"
    if job.recipe.name not in OPTIONS:
        again = "the same options with resume=True"
    display.say(f"{ENDINGS[ending]}: saved to {folder}; go on by\n  {again}")
    raise SystemExit(128 + ending)


def _write_metrics(job: Job) -> None:
    """Writes a line for each epoch so far."""
    if not job.world.rank:
        lines = [json.dumps(epoch.line()) + "\n" for epoch in job.progress.epochs]
        (job.options.out / METRICS).write_text("".join(lines))


def _write_files(job: Job, display: Display, checkpoint: Path, recorded: Recorded | None) -> None:
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
        plain_seconds = None
        if sum(value.numel() for value in weights.values()) <= COMPARED:
            plain_seconds = measure_plain_step(job.recipe, job.options.micro_batches, job.pipe.devices[0])
        display.report(recorded, plain_seconds, out)


def _report(job: Job, recorded: Recorded) -> Report:
    """What `gpipe report` draws."""
    pipe = job.pipe
    configuration = {
        name.replace("_", " ").strip(): value for name, value in {**vars(job.options), **job.how}.items()
    }
    configuration |= {
        "partitions": pipe.partitions,
        "layers of each stage": pipe.layers_per_partition,
        "devices": list(dict.fromkeys(pipe.devices)),
        "torch": torch.__version__,
    }
    return replace(
        recorded.steps.report(job.name),
        memory=recorded.held,
        configuration={name: _words(value) for name, value in configuration.items()},
        losses=tuple(epoch.loss for epoch in job.progress.epochs),
        loss_each="epoch",
    )


def _words(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value) if isinstance(value, Path) else value


def measure_plain_step(recipe: Recipe[Any], micro_batches: int, device: torch.device) -> float:
    """Returns the median seconds of forward and backward of a mini-batch, micro-batch by micro-batch, no remat.

    Layers that the recipe builds anew do it, for this process may not have all, on one device, with one thread on the
    CPU; torch's randomness stays as it was.
    """
    seconds: list[float] = []
    with one_thread(), torch.random.fork_rng([] if device.type == "cpu" else [device]):
        plain = gpipe.Sequential(*recipe.layers()).to(device).train()
        parts = list(zip(*(_parts(both, micro_batches, device) for both in recipe.sample(replicas=1)), strict=True))
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            plain.zero_grad()
            for inputs, targets in parts:
                with precision(recipe.options, device):
                    loss = recipe.loss(plain(inputs), targets) / len(parts)
                loss.backward()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def _parts(value: Any, count: int, device: torch.device) -> list[Any]:
    """The micro-batches of a tensor, or of a tuple of them."""
    if isinstance(value, Tensor):
        return list(value.to(device).tensor_split(min(count, len(value))))
    return list(zip(*(_parts(one, count, device) for one in value), strict=True))
