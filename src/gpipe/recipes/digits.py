"""The job `gpipe train digits`: AmoebaNet-D on handwritten digits, from options to files."""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.datasets import Digits, Images, batches, jitter, load_digits
from gpipe.datasets.digits import CLASSES
from gpipe.models import amoebanet_d
from gpipe.recipes.display import Display
from gpipe.recipes.loop import measure_accuracy, train_epoch
from gpipe.recipes.options import TrainOptions
from gpipe.recipes.plain import measure_plain_step, one_thread
from gpipe.recipes.progress import Epoch, Progress, from_extra, to_extra
from gpipe.recipes.recipe import Recipe
from gpipe.recipes.recorded import Recorded
from gpipe.recipes.world import World, of_first
from gpipe.report import Report, report_json
from gpipe.report.stored import NAME

TERMINATED = 128 + signal.SIGTERM
KEPT = 2  # checkpoints
PATIENCE = 20.0  # seconds without news from another rank that saves; torchrun kills after 30


@dataclass(frozen=True, eq=False)
class Job:
    """All that training needs, checked and built, and how far it is."""

    options: TrainOptions
    recipe: Recipe
    digits: Digits
    pipe: gpipe.GPipe
    optimizer: torch.optim.Optimizer
    progress: Progress
    world: World
    how: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The network and how it is pipelined."""
        o, replicas = self.options, _replicas(self.pipe.partitions, self.world)
        return (
            f"AmoebaNet-D ({o.layers}, {o.filters}), {self.pipe.partitions} partitions, "
            f"{f'{replicas} replicas, ' if replicas > 1 else ''}"
            f"{o.micro_batches} micro-batches, {self._how_in_words}"
        )

    @property
    def _how_in_words(self) -> str:
        if self.options.plan is not None:
            return "planned for this machine"
        return f"schedule {self.options.schedule}, remat {self.options.remat.replace('_', ' ')}"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.options.out / "checkpoints"

    @property
    def steps(self) -> int:
        """How many steps an epoch has."""
        return len(self.digits.train) // self.recipe.batch_size

    def batches(self, epoch: int, first: int = 0) -> Iterator[Images]:
        """Makes this replica's part of the mini-batches of an epoch, counted from 1, from the one numbered `first`.

        Only the first stage reads images; at the others they stay as they are.
        """
        seed, train = self.options.seed, self.digits.train
        replica = self.world.rank // self.pipe.partitions
        for all_rows in batches(len(train), self.recipe.batch_size, seed=seed, epoch=epoch)[first:]:
            rows = all_rows.tensor_split(_replicas(self.pipe.partitions, self.world))[replica]
            batch = train[rows]
            reads = self.pipe.reads_inputs
            images = jitter(batch.images, rows, seed=seed, epoch=epoch) if reads else batch.images
            yield replace(batch, images=images)

    def learning_rates(self, epoch: int, first: int = 0) -> list[float]:
        """Returns the learning rate of each step of an epoch, counted from 1, from the one numbered `first`."""
        before, all_ = (epoch - 1) * self.steps, self.options.epochs * self.steps
        return [self.recipe.learning_rate_at(before + step, all_) for step in range(first, self.steps)]

    def begin_save(self) -> Callable[[], Path]:
        """Begins to save a checkpoint; what it gives waits for it, and gives its folder."""
        extra = to_extra(self.progress, self.options)
        return gpipe.save(
            self.checkpoints, self.pipe, self.optimizer, extra=extra, background=True, keep=KEPT, limit=PATIENCE
        ).wait


def prepare(
    options: TrainOptions,
    recipe: Recipe | None = None,
    digits: Digits | None = None,
    costs: Sequence[float] | None = None,
    world: World | None = None,
) -> Job:
    """Checks the options, reads the images, builds the network and its pipeline, and goes back to where it was.

    Args:
        options: What the command was told.
        recipe: How weights are learnt; by default what suits the digits.
        digits: By default all of them, at 64x64.
        costs: What each layer costs; by default its time is measured.
        world: The processes that train together; by default this one alone.

    Raises:
        ValueError: The options cannot be, or the checkpoint does not fit them: what to do, a line for each.
        ImportError: scikit-learn is not installed.
        OSError: The folder cannot be made.
    """
    world = world or World()
    options = options.settled(world.size if world.launched else None)
    assert options.partitions is not None
    recipe, digits = recipe or Recipe(), digits or load_digits()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed)
        layers = amoebanet_d(options.layers, options.filters, CLASSES)
    replicas = _replicas(options.partitions, world)
    sample = digits.train.images[: recipe.batch_size // replicas]
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
    options.out.mkdir(parents=True, exist_ok=True)
    optimizer = recipe.optimizer(pipe.parameters())
    job = Job(options, recipe, digits, pipe, optimizer, Progress(), world, how)
    return replace(job, progress=_begin(job))


def _how(options: TrainOptions, layers: Sequence[nn.Module], sample: Tensor, world: World) -> dict[str, Any]:
    """The partitions, and what is done in which order: as the options say, or as is fastest on this machine."""
    assert options.partitions is not None
    if options.plan is None:
        return {"partitions": options.partitions, "schedule": options.schedule, "remat": options.remat}
    k, m = options.partitions, options.micro_batches // _replicas(options.partitions, world)

    def found() -> gpipe.Plan:
        return gpipe.find_plan(layers, sample, k, partitions=k, micro_batches=m, measure=True)

    with one_thread():
        return dict(of_first(world, lambda: _parts(found()))) if world.launched else {"plan": found()}


def _parts(plan: gpipe.Plan) -> dict[str, Any]:
    """What a plan says to `GPipe`, in plain values."""
    return {
        "partitions": list(plan.layers_per_partition),
        "schedule": plan.schedule,
        "stages_per_rank": plan.stages_per_rank,
        "remat": list(plan.remat),
    }


def _replicas(partitions: int, world: World) -> int:
    """How many replicas the processes are."""
    return world.size // partitions if world.launched else 1


def _begin(job: Job) -> Progress:
    """Goes back to the latest checkpoint if that is wanted, and there is one; else puts those of earlier runs aside.

    Rank 0 looks, so that all do the same.
    """
    wanted = job.options.resume or job.world.restarts > 0
    found = wanted and not job.world.rank and gpipe.find_checkpoint(job.checkpoints) is not None
    if any(job.pipe.team.exchange(b"found" if found else b"")):
        return from_extra(gpipe.load(job.checkpoints, job.pipe, job.optimizer).extra, job.options)
    if not job.world.rank and job.checkpoints.exists():
        old = job.checkpoints.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        job.checkpoints.rename(old)
    return Progress()


def run(job: Job, console: Console | None = None) -> list[Epoch]:
    """Trains, shows how it goes, and writes the files; the pipeline is closed afterwards.

    Raises:
        SystemExit: After SIGTERM, with status 143; what was done is saved.
    """
    display = Display(console or Console(quiet=job.world.rank > 0), job.options.epochs, job.steps)
    with job.pipe, one_thread():
        with gpipe.catch_sigterm(job.pipe) as is_to_end:
            recorded = _train(job, display, is_to_end)
        checkpoint = job.begin_save()()
    if not job.world.rank:
        write_files(job, checkpoint, recorded)
        if recorded is not None:
            _report(job, display, recorded)
    return job.progress.epochs


def _train(job: Job, display: Display, is_to_end: Callable[[], bool]) -> Recorded | None:
    """Trains what is left; gives what was recorded of the last epoch, if there is one left."""
    progress, recorded = job.progress, None
    if progress.epochs or progress.losses:
        display.say(f"goes on after {progress}, from {job.checkpoints}")
    _write_metrics(job)
    with display.training(job.name, job.pipe, len(progress.epochs) * job.steps + len(progress.losses)):
        while len(progress.epochs) < job.options.epochs:
            epoch, recorded = _epoch(job, display, is_to_end)
            progress.epochs.append(epoch)
            progress.losses, progress.seconds = [], 0.0
            _write_metrics(job)
            display.epoch_ended(epoch.epoch, epoch.loss, epoch.accuracy)
            if epoch.epoch % job.options.checkpoint_every == 0 and epoch.epoch < job.options.epochs:
                job.begin_save()
    return recorded


def _epoch(job: Job, display: Display, is_to_end: Callable[[], bool]) -> tuple[Epoch, Recorded | None]:
    """Trains and evaluates the next epoch, or what is left of it; the last one is recorded."""
    progress, number = job.progress, len(job.progress.epochs) + 1
    first, start = len(progress.losses), time.perf_counter() - progress.seconds
    last = number == job.options.epochs

    def after_step(loss: float) -> None:
        progress.losses.append(loss)
        progress.seconds = time.perf_counter() - start
        display.step_ended()
        if is_to_end():
            display.say(f"SIGTERM: saved to {job.begin_save()()}; --resume goes on from there")
            raise SystemExit(TERMINATED)

    with Recorded.of(job.pipe, job.steps - first) if last else nullcontext() as recorded:
        batches, rates = job.batches(number, first), job.learning_rates(number, first)
        given = batches if recorded is None else recorded.loading(batches)
        train_epoch(job.pipe, job.optimizer, given, rates, F.cross_entropy, after_step)
    accuracy = measure_accuracy(job.pipe, job.digits.held_out)
    loss = sum(progress.losses) / len(progress.losses)
    return Epoch(number, loss, accuracy, time.perf_counter() - start), recorded


def _write_metrics(job: Job) -> None:
    if not job.world.rank:
        lines = [json.dumps(asdict(epoch)) + "\n" for epoch in job.progress.epochs]
        (job.options.out / "metrics.jsonl").write_text("".join(lines))


def write_files(job: Job, checkpoint: Path, recorded: Recorded | None) -> None:
    """Writes weights under unpartitioned names, the typical step as a picture, all as a trace and as a report."""
    out = job.options.out
    weights = {name: value.contiguous() for name, value in gpipe.load(checkpoint).state_dict().items()}
    (out / "model.safetensors").write_bytes(save(weights))
    if recorded is not None:
        recorded.steps.save(out / "timeline.svg")
        recorded.steps.save(out / "trace.json")
        (out / NAME).write_text(report_json(to_report(job, recorded)), encoding="utf-8")


def to_report(job: Job, recorded: Recorded) -> Report:
    """What `gpipe report` draws."""
    options = {name.replace("_", " "): value for name, value in asdict(job.options).items()}
    pipe, plan = job.pipe, job.how.get("plan")
    how = job.how if plan is None else _parts(plan)
    return replace(
        recorded.steps.report(job.name),
        memory=recorded.held,
        configuration={
            **options,
            **{name.replace("_", " "): _words(value) for name, value in how.items()},
            "out": str(job.options.out),
            "partitions": pipe.partitions,
            "layers of each stage": ", ".join(map(str, pipe.layers_per_partition)),
            "devices": ", ".join(dict.fromkeys(map(str, pipe.devices))),
            "torch": torch.__version__,
        },
        losses=tuple(epoch.loss for epoch in job.progress.epochs),
        loss_each="epoch",
    )


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _report(job: Job, display: Display, recorded: Recorded) -> None:
    """Says how the pipeline compares to the plain loop, of layers of its own: this process may not have all."""
    batch, device = job.digits.train[: job.recipe.batch_size], job.pipe.devices[0]
    make = partial(amoebanet_d, job.options.layers, job.options.filters, CLASSES)
    plain = measure_plain_step(make, batch, job.options.micro_batches, F.cross_entropy, device)
    display.report(recorded, plain, job.options.out)
