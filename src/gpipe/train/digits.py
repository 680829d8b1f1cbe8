"""The job `gpipe train digits`: AmoebaNet-D on handwritten digits, from options to files."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save
from torch import nn
from torch.nn import functional as F

import gpipe
from gpipe.data import Digits, Images, batches, jitter, load_digits
from gpipe.data.digits import CLASSES
from gpipe.models import amoebanet_d
from gpipe.plan.timeline import Timeline
from gpipe.report import timeline_svg, trace_json
from gpipe.train.display import Display, Times
from gpipe.train.loop import measure_accuracy, train_epoch
from gpipe.train.options import TrainOptions
from gpipe.train.plain import measure_plain_step, one_thread
from gpipe.train.recipe import Recipe


@dataclass(frozen=True)
class Epoch:
    """What an epoch came to, a line of metrics.jsonl; accuracy is a share of the held-out images."""

    epoch: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Job:
    """All that training needs, checked and built."""

    options: TrainOptions
    recipe: Recipe
    digits: Digits
    layers: list[nn.Module]
    pipe: gpipe.GPipe

    @property
    def name(self) -> str:
        """The network and how it is pipelined."""
        o = self.options
        return (
            f"AmoebaNet-D ({o.layers}, {o.filters}), {o.partitions} partitions, "
            f"{o.micro_batches} micro-batches, remat {o.remat.replace('_', ' ')}"
        )

    @property
    def steps(self) -> int:
        """How many steps an epoch has."""
        return len(self.digits.train) // self.recipe.batch_size

    def batches(self, epoch: int) -> Iterator[Images]:
        """Makes the mini-batches of an epoch, counted from 1."""
        seed, train = self.options.seed, self.digits.train
        for rows in batches(len(train), self.recipe.batch_size, seed=seed, epoch=epoch):
            batch = train[rows]
            yield replace(batch, images=jitter(batch.images, rows, seed=seed, epoch=epoch))

    def learning_rates(self, epoch: int) -> list[float]:
        """Returns the learning rate of each step of an epoch, counted from 1."""
        first, all_ = (epoch - 1) * self.steps, self.options.epochs * self.steps
        return [self.recipe.learning_rate_at(first + step, all_) for step in range(self.steps)]


def prepare(
    options: TrainOptions,
    recipe: Recipe | None = None,
    digits: Digits | None = None,
    costs: Sequence[float] | None = None,
) -> Job:
    """Checks the options, reads the images, builds the network and its pipeline.

    Args:
        options: What the command was told.
        recipe: How weights are learnt; by default what suits the digits.
        digits: By default all of them, at 64x64.
        costs: What each layer costs; by default its time is measured.

    Raises:
        ValueError: The options cannot be: what to do, a line for each.
        ImportError: scikit-learn is not installed.
        OSError: The folder cannot be made.
    """
    options.check()
    recipe, digits = recipe or Recipe(), digits or load_digits()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed)
        layers = amoebanet_d(options.layers, options.filters, CLASSES)
    pipe = gpipe.GPipe(
        layers,
        options.partitions,
        options.micro_batches,
        costs=costs,
        sample=None if costs else digits.train.images[: recipe.batch_size],
        schedule=options.schedule,
        remat=options.remat,
        seed=options.seed,
        intra_op_threads=1,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    return Job(options, recipe, digits, layers, pipe)


def run(job: Job, console: Console | None = None) -> list[Epoch]:
    """Trains, shows how it goes, and writes the files; the pipeline is closed afterwards."""
    options = job.options
    display = Display(console or Console(), options.epochs, job.steps)
    metrics = options.out / "metrics.jsonl"
    metrics.write_text("")
    optimizer = job.recipe.optimizer(job.pipe.parameters())
    epochs: list[Epoch] = []
    with job.pipe, one_thread():
        with display.training(job.name, job.pipe):
            for number in range(1, options.epochs + 1):
                epoch, timelines = _epoch(job, optimizer, number, display)
                epochs.append(epoch)
                with metrics.open("a") as lines:
                    lines.write(json.dumps(asdict(epoch)) + "\n")
                display.epoch_ended(number, epoch.loss, epoch.accuracy)
        write_files(job, timelines)
    batch, first_device = next(job.batches(epoch=1)), job.pipe.devices[0]
    plain = measure_plain_step(job.layers, batch, options.micro_batches, F.cross_entropy, first_device)
    display.report(Times(timelines, plain, job.pipe.partitions, options.micro_batches), options.out)
    return epochs


def _epoch(job: Job, optimizer: torch.optim.Optimizer, number: int, display: Display) -> tuple[Epoch, list[Timeline]]:
    """Trains and evaluates one epoch; the last one is recorded."""
    start = time.perf_counter()
    last = number == job.options.epochs
    with gpipe.record(job.pipe) if last else nullcontext() as recording:
        loss, outside = train_epoch(
            job.pipe, optimizer, job.batches(number), job.learning_rates(number), F.cross_entropy, display.step_ended
        )
    timelines = [] if recording is None else recording.timelines
    accuracy = measure_accuracy(job.pipe, job.digits.held_out)
    return (
        Epoch(number, loss, accuracy, time.perf_counter() - start),
        [replace(timeline, other=other) for timeline, other in zip(timelines, outside, strict=last)],
    )


def write_files(job: Job, timelines: list[Timeline]) -> None:
    """Writes weights under unpartitioned names, the step of median length as a picture, all steps as a trace."""
    out: Path = job.options.out
    weights = {name: value.contiguous() for name, value in job.pipe.state_dict().items()}
    (out / "model.safetensors").write_bytes(save(weights))
    typical = sorted(timelines, key=lambda timeline: timeline.seconds)[len(timelines) // 2]
    (out / "timeline.svg").write_text(timeline_svg(typical, job.name))
    (out / "trace.json").write_text(trace_json(timelines))
