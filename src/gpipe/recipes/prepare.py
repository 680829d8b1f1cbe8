"""From options to a job: the network and its pipe, built, and how far the run in its folder is."""

import fcntl
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
from gpipe.recipes.data import imported
from gpipe.recipes.options.files import write_config
from gpipe.recipes.options.training import TrainOptions, flag, refuse
from gpipe.recipes.recipe import Averages, Recipe, Share
from gpipe.recipes.world import World, find_world, of_first

CHECKPOINTS = "checkpoints"
WEIGHTS = "model.safetensors"
EVALUATION = "evaluation.json"
KEPT = 2  # checkpoints
PATIENCE = 20.0  # seconds without news from another rank that saves; torchrun kills after 30


@dataclass(frozen=True)
class Epoch:
    """What an epoch, counted from 1, came to: the mean loss of its steps, and what was measured on held-out data."""

    epoch: int
    loss: float
    measured: Mapping[str, float]
    seconds: float

    def line(self) -> dict[str, float]:
        return {"epoch": self.epoch, "loss": self.loss, **self.measured, "seconds": self.seconds}


@dataclass
class Progress:
    """The epochs that are over, and of the one that has begun the losses of its steps and its seconds."""

    epochs: list[Epoch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"epoch {len(self.epochs)}" + (f", step {len(self.losses)} of the next" if self.losses else "")


def to_extra(progress: Progress, options: TrainOptions, data: str = "") -> dict[str, Any]:
    """The progress, the options that decide numbers, and what identifies the data, for a checkpoint to keep."""
    decisive = {
        name: value if isinstance(value, int | float | None) else str(value)
        for name, value in vars(options).items()
        if name not in options.UNDECISIVE
    }
    return {**asdict(progress), "options": decisive, "data": data}


def from_extra(extra: Mapping[str, Any], options: TrainOptions, data: str = "") -> Progress:
    """Reads the progress that a checkpoint kept; a ValueError names each option that differs, and other data."""
    before, now = extra["options"], to_extra(Progress(), options)["options"]
    problems = [
        f"{flag(name)} is {value}, and the checkpoint is of a training with {before.get(name)}: give that, or start "
        f"anew without --resume"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if extra["data"] != data:
        problems.append("the training data are not those of the checkpoint: bring them back, or start anew")
    refuse(problems)
    return Progress([Epoch(**epoch) for epoch in extra["epochs"]], list(extra["losses"]), extra["seconds"])


@contextmanager
def locked(folder: Path, world: World) -> Iterator[None]:
    """Keeps the folder of a run for one training, by its rank 0; the lock ends with the process, too."""
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
                f"--out is {folder}, into which another training writes: wait for its end, or choose another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


class Job:
    """All that training needs, checked and built, and how far it is.

    `how` is how the network is cut and run, in plain values; `share` is what this process reads of each mini-batch.
    """

    def __init__(self, recipe: Recipe[Any], pipe: gpipe.GPipe, how: Mapping[str, Any], world: World) -> None:
        self.recipe, self.pipe, self.how, self.world = recipe, pipe, how, world
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
        o, replicas = self.options, self.share.replicas
        how = f"schedule {o.schedule}, remat {o.remat.replace('_', ' ')}"
        return (
            f"{self.recipe.title}, {self.pipe.partitions} partitions, "
            f"{f'{replicas} replicas, ' if replicas > 1 else ''}"
            f"{o.micro_batches} micro-batches, {how if o.plan is None else 'planned for this machine'}"
        )

    @property
    def done(self) -> int:
        return len(self.progress.epochs) * self.recipe.steps_per_epoch + len(self.progress.losses)

    def steps_of(self, epoch: int) -> int:
        """How many steps an epoch has, counted from 1."""
        return min(self.recipe.steps_per_epoch, self.steps - (epoch - 1) * self.recipe.steps_per_epoch)

    def begin_save(self) -> Callable[[], Path]:
        """Begins to save a checkpoint; what it gives waits for it, and gives its folder.

        A last epoch that was short is saved as one that has begun: more steps may come.
        """
        whole = self.progress.epochs[: self.steps // self.recipe.steps_per_epoch]
        extra = to_extra(replace(self.progress, epochs=whole), self.options, self.recipe.data)
        return gpipe.save(
            self.checkpoints, self.pipe, self.optimizer, extra=extra, background=True, keep=KEPT, limit=PATIENCE
        ).wait


def precision(options: TrainOptions, device: torch.device) -> AbstractContextManager[Any]:
    """What forwards are computed in: float32, or under autocast."""
    return torch.autocast(device.type, torch.bfloat16) if options.bf16 else nullcontext()


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets the calling thread compute alone, so that no helpers of its own compete with the ranks for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def prepare(recipe: Recipe[Any], world: World | None = None, *, measure: bool = True) -> Job:
    """Builds the network and its pipeline, and goes back to where the run was.

    The time of layers is measured, unless they are cut by their parameters (`measure=False`). The processes are by
    default those of torchrun, or else this one alone. A ValueError says of options that cannot be, or do not fit the
    checkpoint, what to do, a line for each.
    """
    world, options = world or find_world(os.environ), recipe.options
    if (tracker := options.report_to) is not None:
        imported(tracker, f"--report-to {tracker} needs {tracker}", tracker)
    layers = build(recipe)
    begun = options.resume and gpipe.find_checkpoint(options.out / CHECKPOINTS) is not None
    if options.resume and not begun and (options.out / WEIGHTS).is_file():
        remedy = f"leave --resume out to begin anew, or start from them by --from {options.out} in another folder"
        raise ValueError(f"{options.out} has the weights of a run and no checkpoint to go on from: {remedy}")
    if options.from_ is not None and not begun:
        recipe.fit(read_weights(options.from_), layers)
    pipe, how = make_pipe(recipe, layers, world, measure=measure)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"--out is {options.out}, which cannot be made: {error.strerror}; choose another folder"
        raise ValueError(why) from None
    with locked(options.out, world):
        job = Job(recipe, pipe, how, world)
        _begin(job)
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
    """The weights of a run: those that it ended with, or its latest checkpoint's."""
    if (run / WEIGHTS).is_file():
        try:
            return load_file(run / WEIGHTS)
        except SafetensorError as error:
            raise ValueError(f"{run / WEIGHTS} cannot be read: {error}; train again, or bring it back") from None
    if gpipe.find_checkpoint(run / CHECKPOINTS) is None:
        raise ValueError(f"{run} has neither {WEIGHTS} nor a checkpoint: give the folder of a run that was trained")
    return gpipe.load(run / CHECKPOINTS).state_dict()


def make_pipe(
    recipe: Recipe[Any], layers: Any, world: World, sample: Any = None, *, measure: bool = True
) -> tuple[gpipe.GPipe, dict[str, Any]]:
    """Cuts the layers, or a model, as the options say, or as is fastest on this machine; gives also how."""
    o: TrainOptions = recipe.options
    k = o.partitions
    assert k is not None
    replicas = world.size // k if world.launched else 1
    m = o.micro_batches // replicas
    if measure or o.plan is not None:
        sample = recipe.sample(replicas).inputs

    def planned() -> dict[str, Any]:
        first: Any = sample
        while not isinstance(first, Tensor):
            first = first[0]
        even = max(m, len(first) - len(first) % m)  # rows that make equal parts
        return gpipe.find_plan(layers, sample, k, even, partitions=k, micro_batches=m, measure=True).to_json()

    how: dict[str, Any] = {"partitions": k, "schedule": o.schedule, "remat": o.remat}
    if o.plan is not None:
        with one_thread():
            how = {"plan": gpipe.Plan.from_json(of_first(world, planned))}
    elif sample is not None and not measure:  # of a model, which is recorded on it
        layers = gpipe.layers_of(layers, sample)
        costs = [1.0] * len(layers)
        how = {"plan": gpipe.find_plan(layers, None, k, micro_batches=m, costs=costs, balance="variance")}
    driver = "process" if world.launched else None
    pipe = gpipe.GPipe(layers, micro_batches=m, sample=sample, seed=o.seed, driver=driver, **how)
    plan = pipe.plan
    chosen = {"stages_per_rank": plan.stages_per_rank, "schedule": plan.schedule, "remat": plan.remat}
    return pipe, {"partitions": plan.layers_per_partition, **chosen} if "plan" in how else how


def _begin(job: Job) -> None:
    """Goes back to the latest checkpoint if rank 0 finds one that is wanted; else puts those of others aside."""
    wanted = job.options.resume or job.world.restarts > 0
    found = wanted and not job.world.rank and gpipe.find_checkpoint(job.checkpoints) is not None
    if any(job.pipe.exchange(b"found" if found else b"")):
        extra = gpipe.load(job.checkpoints, job.pipe, job.optimizer).extra
        job.progress = from_extra(extra, job.options, job.recipe.data)
        if job.done > job.steps:
            remedy = "give as many or more by --steps or --epochs, or start anew without --resume"
            raise ValueError(f"{job.done} steps were trained before, and this is a training of {job.steps}: {remedy}")
    elif not job.world.rank:
        for name in (WEIGHTS, EVALUATION):
            (job.options.out / name).unlink(missing_ok=True)
        if job.checkpoints.exists():
            old = job.checkpoints.with_suffix(".old")
            shutil.rmtree(old, ignore_errors=True)
            job.checkpoints.rename(old)
