"""The files of a run, the step of the plain loop that it is compared with, and what is said at its end."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

import gpipe
from gpipe.profiling import Report, report_json
from gpipe.profiling.stored import NAME
from gpipe.recipes.display import Display, Recorded
from gpipe.recipes.job import Job, parts_of, precision
from gpipe.recipes.recipe import Batch, Recipe

REPEATS = 3  # and one before them to warm up


def measure_plain_step(recipe: Recipe[Any], micro_batches: int, device: torch.device) -> float:
    """Returns the median seconds of forward and backward of a mini-batch, micro-batch by micro-batch, no remat.

    Layers that the recipe builds anew do it, on one device, with one thread on the CPU; torch's randomness stays as
    it was.
    """
    seconds: list[float] = []
    with one_thread(), torch.random.fork_rng([] if device.type == "cpu" else [device]):
        plain = gpipe.Sequential(*recipe.layers()).to(device).train()
        parts = _split(recipe.sample(replicas=1), micro_batches, device)
        for _ in range(1 + REPEATS):
            start = perf_counter()
            _plain_step(plain, parts, recipe)
            seconds.append(perf_counter() - start)
    return median(seconds[1:])


def _split(batch: Batch, micro_batches: int, device: torch.device) -> list[Batch]:
    """The micro-batches of a mini-batch whose inputs and targets are tensors, or tuples of them."""

    def parts(value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            return list(value.to(device).tensor_split(min(micro_batches, len(value))))
        return list(zip(*map(parts, value), strict=True))

    return [Batch(*both) for both in zip(parts(batch.inputs), parts(batch.targets), strict=True)]


def _plain_step(plain: nn.Module, parts: list[Batch], recipe: Recipe[Any]) -> None:
    plain.zero_grad()
    device = next(plain.parameters()).device
    for part in parts:
        with precision(recipe.options, device):
            loss = recipe.loss(plain(part.inputs), part.targets) / len(parts)
        loss.backward()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets the calling thread compute alone, so that no helpers of its own compete with the ranks for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


WEIGHTS = "model.safetensors"
METRICS = "metrics.jsonl"
AVERAGES = "averages"
"""A folder for the time of their writing."""
EVALUATION = "evaluation.json"
COMPARED = 2**27
"""Parameters, above which the plain loop, which needs all of them once more, is not timed."""


def write_metrics(job: Job) -> None:
    """Writes a line for each epoch so far."""
    if not job.world.rank:
        lines = [json.dumps(epoch.line()) + "\n" for epoch in job.progress.epochs]
        (job.options.out / METRICS).write_text("".join(lines))


def write_files(job: Job, display: Display, checkpoint: Path, recorded: Recorded | None) -> None:
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
        (out / NAME).write_text(report_json(to_report(job, recorded)), encoding="utf-8")
        parameters = sum(value.numel() for value in weights.values())
        display.report(recorded, _plain_seconds(job) if parameters <= COMPARED else None, out)


def _plain_seconds(job: Job) -> float:
    """Seconds of a step of the plain loop, of layers of its own: this process may not have all."""
    recipe, device = job.recipe, job.pipe.devices[0]
    return measure_plain_step(recipe, job.options.micro_batches, device)


def to_report(job: Job, recorded: Recorded) -> Report:
    """What `gpipe report` draws."""
    options = {name.replace("_", " ").strip(): _words(value) for name, value in asdict(job.options).items()}
    pipe = job.pipe
    return replace(
        recorded.steps.report(job.name),
        memory=recorded.held,
        configuration={
            **options,
            **{name.replace("_", " "): _words(value) for name, value in _how(job).items()},
            "partitions": pipe.partitions,
            "layers of each stage": ", ".join(map(str, pipe.layers_per_partition)),
            "devices": ", ".join(dict.fromkeys(map(str, pipe.devices))),
            "torch": torch.__version__,
        },
        losses=tuple(epoch.loss for epoch in job.progress.epochs),
        loss_each="epoch",
    )


def _how(job: Job) -> Mapping[str, Any]:
    plan = job.how.get("plan")
    return job.how if plan is None else parts_of(plan)


def _words(value: Any) -> Any:
    match value:
        case list() | tuple():
            return ", ".join(map(str, value))
        case Path():
            return str(value)
        case _:
            return value
