"""Builds a training job from a recipe: the layers, the pipe, and the progress of the run so far."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import gpipe
from gpipe.recipes.data import require
from gpipe.recipes.options.files import CONFIG, INPUTS, write_config
from gpipe.recipes.options.training import TrainOptions, flag, raise_all
from gpipe.recipes.recipe import Averages, Recipe, Share
from gpipe.recipes.world import World, broadcast_from_first, find_world

CHECKPOINTS = "checkpoints"
WEIGHTS = "model.safetensors"
EVALUATION = "evaluation.json"
KEPT_CHECKPOINTS = 2
SAVE_TIMEOUT = 20.0  # Seconds to wait for other ranks in a save. torchrun kills processes 30 s after SIGTERM.


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch.

    Attributes:
        epoch: Number of the epoch, counted from 1.
        loss: Mean loss of the steps in the epoch.
        measured: Metrics on held-out data, by name.
        seconds: Duration of the epoch in seconds, including the evaluation.
    """

    epoch: int
    loss: float
    measured: Mapping[str, float]
    seconds: float

    def line(self) -> dict[str, float]:
        """Returns the results as a flat dict, which becomes a line of metrics.jsonl."""
        return {"epoch": self.epoch, "loss": self.loss, **self.measured, "seconds": self.seconds}


@dataclass
class Progress:
    """The completed epochs of a run, and the losses and duration of the epoch in progress."""

    epochs: list[Epoch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"epoch {len(self.epochs)}" + (f", step {len(self.losses)} of the next" if self.losses else "")


def to_extra(progress: Progress, options: TrainOptions, data: str = "") -> dict[str, Any]:
    """Returns data for a checkpoint: the progress, the options that change results, and the data fingerprint."""
    decisive = {
        name: value if isinstance(value, int | float | None) else str(value)
        for name, value in vars(options).items()
        if name not in options.UNDECISIVE
    }
    return {**asdict(progress), "options": decisive, "data": data}


def from_extra(extra: Mapping[str, Any], options: TrainOptions, data: str = "") -> Progress:
    """Returns the progress from the data that `to_extra` stored in a checkpoint.

    Raises:
        ValueError: If the training data or an option that changes results differs from the checkpoint.
    """
    before, now = extra["options"], to_extra(Progress(), options)["options"]
    problems = [
        f"{flag(name)}: {value} differs from {before.get(name)} in the checkpoint. Pass {before.get(name)}, or start "
        "again without --resume."
        for name, value in now.items()
        if before.get(name) != value
    ]
    if extra["data"] != data:
        problems.append("--resume: the training data has changed. Restore it, or start again without --resume.")
    raise_all(problems)
    return Progress([Epoch(**epoch) for epoch in extra["epochs"]], list(extra["losses"]), extra["seconds"])


@contextmanager
def locked(folder: Path, world: World) -> Iterator[None]:
    """Locks the folder of a run on rank 0. The lock is also released if the process ends early."""
    if world.rank:
        yield
        return
    with ExitStack() as stack:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--out: {folder} is in use by a running training. Wait until it ends, or choose a different folder."
            ) from None
        except OSError:
            pass  # The file system does not support locks.
        yield


class Job:
    """A training job: a recipe with its pipe, optimizer and progress.

    Attributes:
        settings: Partitions, schedule and recomputation as plain values, for the report.
        share: The part of each mini-batch that this process reads.
        steps: Total number of steps.
        epochs: Total number of epochs. The last epoch may be shorter.
    """

    def __init__(self, recipe: Recipe[Any], pipe: gpipe.GPipe, settings: Mapping[str, Any], world: World) -> None:
        self.recipe, self.pipe, self.settings, self.world = recipe, pipe, settings, world
        self.options: TrainOptions = recipe.options
        self.optimizer = recipe.optimizer(pipe.parameters())
        self.averages = Averages(self.optimizer, recipe.averaging)
        self.progress = Progress()
        self.checkpoints = self.options.out / CHECKPOINTS
        replicas = self.options.micro_batches // pipe.micro_batches
        self.share = Share(world.rank // pipe.partitions, replicas, pipe.reads_inputs)
        self.steps: int = self.options.steps or self.options.epochs * recipe.steps_per_epoch
        self.epochs = ceil(self.steps / recipe.steps_per_epoch)

    @property
    def name(self) -> str:
        """A title with the model, the number of partitions and the schedule."""
        o, replicas = self.options, self.share.replicas
        settings = f"schedule {o.schedule}, remat {o.remat}" if o.plan is None else "planned for this machine"
        return (
            f"{self.recipe.title}, {self.pipe.partitions} partitions, "
            f"{f'{replicas} replicas, ' if replicas > 1 else ''}{o.micro_batches} micro-batches, {settings}"
        )

    @property
    def done(self) -> int:
        """The number of completed steps."""
        return len(self.progress.epochs) * self.recipe.steps_per_epoch + len(self.progress.losses)

    def steps_of(self, epoch: int) -> int:
        """Returns the number of steps in an epoch, counted from 1."""
        return min(self.recipe.steps_per_epoch, self.steps - (epoch - 1) * self.recipe.steps_per_epoch)

    def begin_save(self) -> Callable[[], Path]:
        """Starts to save a checkpoint in the background.

        Returns a function that waits for the save and returns the folder.

        A last epoch with fewer steps is saved as incomplete, because a resumed run may add steps to this epoch.
        """
        whole = self.progress.epochs[: self.steps // self.recipe.steps_per_epoch]
        extra = to_extra(replace(self.progress, epochs=whole), self.options, self.recipe.data)
        settings: dict[str, Any] = {"background": True, "keep": KEPT_CHECKPOINTS, "limit": SAVE_TIMEOUT}
        return gpipe.save(self.checkpoints, self.pipe, self.optimizer, extra=extra, **settings).wait


def precision(options: TrainOptions, device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context for forward passes. With --bf16, uses autocast to bfloat16."""
    return torch.autocast(device.type, torch.bfloat16) if options.bf16 else nullcontext()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one intra-op thread, so that additional threads do not compete with the ranks for cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def prepare(recipe: Recipe[Any], world: World | None = None, *, measure: bool = True) -> Job:
    """Builds the layers, the pipe and the optimizer of a recipe, and resumes the run if there is a checkpoint.

    Args:
        recipe: The recipe.
        world: The processes that train together. Default: all processes that torchrun started, otherwise only this
            process.
        measure: Whether to measure the time of each layer, to balance the time of stages. If False, balances the
            number of parameters of stages.

    Raises:
        ValueError: If options are invalid or do not match the checkpoint. The message has one line per problem.
    """
    world, options = world or find_world(os.environ), recipe.options
    if (tracker := options.report_to) is not None:
        require(tracker, f"--report-to {tracker} requires {tracker}", tracker)
    layers = build(recipe)
    if options.from_ is not None and not (options.resume and gpipe.find_checkpoint(options.out / CHECKPOINTS)):
        recipe.fit(read_weights(options.from_), layers)
    pipe, settings = make_pipe(recipe, layers, world, measure=measure)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out: {options.out} cannot be created: {error.strerror}. Choose a different folder."
        ) from None
    with locked(options.out, world):
        job = Job(recipe, pipe, settings, world)
        _restore(job)
        write_config(options.out, recipe.name, options)
        if not world.rank:
            recipe.write(options.out)
    return job


def build(recipe: Recipe[Any]) -> list[nn.Module]:
    """Builds the layers. The random generator of their initial weights is seeded with `--seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.options.seed)
        return recipe.layers()


def read_weights(run: Path) -> Mapping[str, Any]:
    """Reads the final weights of a run. If the run has not finished, reads the weights of its latest checkpoint."""
    if (run / WEIGHTS).is_file():
        try:
            return load_file(run / WEIGHTS)
        except SafetensorError as error:
            raise ValueError(f"{run / WEIGHTS}: cannot be read: {error}. Restore the file, or train again.") from None
    if gpipe.find_checkpoint(run / CHECKPOINTS) is None:
        raise ValueError(
            f"{run}: contains neither {WEIGHTS} nor a checkpoint. Pass the folder of a run that `gpipe train` wrote."
        )
    return gpipe.load(run / CHECKPOINTS).state_dict()


def make_pipe(
    recipe: Recipe[Any], layers: Any, world: World, sample: Any = None, *, measure: bool = True
) -> tuple[gpipe.GPipe, dict[str, Any]]:
    """Builds a pipe from layers or a model. With --plan auto, uses the fastest plan, otherwise the options.

    Args:
        recipe: The recipe.
        layers: The layers, or a model.
        world: The processes that train together.
        sample: The inputs on which a model is traced. Not needed for layers.
        measure: Whether to measure the time of each layer.

    Returns:
        The pipe, and its partitions, schedule and recomputation as plain values.
    """
    o: TrainOptions = recipe.options
    k = o.partitions
    assert k is not None
    replicas = world.size // k if world.launched else 1
    m = o.micro_batches // replicas
    if measure or o.plan is not None:
        sample = recipe.sample(replicas).inputs

    def search() -> dict[str, Any]:
        first: Any = sample
        while not isinstance(first, Tensor):
            first = first[0]
        rows = max(m, len(first) - len(first) % m)  # The planner requires micro-batches of the same size.
        return gpipe.find_plan(layers, sample, k, rows, partitions=k, micro_batches=m, measure=True).to_json()

    settings: dict[str, Any] = {"partitions": k, "schedule": o.schedule, "remat": o.remat}
    if o.plan is not None:
        with one_thread():
            settings = {"plan": gpipe.Plan.from_json(broadcast_from_first(world, search))}
    elif sample is not None and not measure:  # A model, which gpipe traces on the sample.
        layers = gpipe.layers_of(layers, sample)
        costs = [1.0] * len(layers)
        settings = {"plan": gpipe.find_plan(layers, None, k, micro_batches=m, costs=costs, balance="variance")}
    driver = "process" if world.launched else None
    pipe = gpipe.GPipe(layers, micro_batches=m, sample=sample, seed=o.seed, driver=driver, **settings)
    if "plan" in settings:
        settings = {name: getattr(pipe.plan, name) for name in ("stages_per_rank", "schedule", "remat")}
        settings = {"partitions": pipe.plan.layers_per_partition, **settings}
    return pipe, settings


def _restore(job: Job) -> None:
    """Loads the latest checkpoint if the run resumes and the processes find a checkpoint.

    Otherwise renames old checkpoints. All processes pass the same options, except for paths on their hosts.
    """
    options, pipe, world = job.options, job.pipe, job.world
    same = {flag(name): str(value) for name, value in vars(options).items() if name not in ("config", "out", *INPUTS)}
    own = [options.resume or world.restarts > 0, (options.out / WEIGHTS).is_file(), same]
    gathered = [json.loads(message) for message in pipe.exchange(json.dumps(own).encode())]
    resumes, has_weights, first = gathered[0]
    raise_all(
        f"{name}: {value} on rank {rank} differs from {first[name]} on rank 0. Pass the same options to all "
        f"processes, or copy {CONFIG} of rank 0 to their folders."
        for rank, (_, _, values) in enumerate(gathered)
        for name, value in values.items()
        if value != first[name]
    )
    if resumes and gpipe.find_checkpoint(job.checkpoints, pipe) is not None:
        extra = gpipe.load(job.checkpoints, pipe, job.optimizer).extra
        job.progress = from_extra(extra, options, job.recipe.data)
        if job.done > job.steps:
            raise ValueError(
                f"--resume: the run has already trained {job.done} steps, but this training has only {job.steps}. "
                "Increase --steps or --epochs, or start again without --resume."
            )
        return
    if options.resume and has_weights:
        raise ValueError(
            f"--resume: {options.out} contains final weights but no checkpoint. Remove --resume to start again, or "
            f"start from the weights with --from {options.out} and a different --out."
        )
    if not world.rank:
        for name in (WEIGHTS, EVALUATION):
            (options.out / name).unlink(missing_ok=True)
    for turn in range(world.size):  # one after the other, because processes may share a folder
        if turn == world.rank and job.checkpoints.exists():
            old = job.checkpoints.with_suffix(".old")
            shutil.rmtree(old, ignore_errors=True)
            job.checkpoints.rename(old)
        pipe.exchange(b"")
