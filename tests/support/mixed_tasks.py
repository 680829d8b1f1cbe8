"""Same bits: what is done with models that mix everything, and what comes of it by a pipe and in plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import gpipe
from gpipe.batch.microbatch import Reduction
from gpipe.schedule.schedules.by_name import Named
from tests.support import plain_loop as laws
from tests.support.addresses import by_address, factor_of, twins
from tests.support.outcomes import Outcome, differences, train_twice
from tests.support.plain_loop import Tree
from tests.support.random_models import End, Knobs, Model, generate
from tests.support.shared_weights import lent

ROWS = 16  # at most, in a mini-batch
MIXED, VARIOUS = Knobs((3, 9), reshapes=False, norms=True, shares=True), Knobs((1, 8), True, norms=True, shares=False)


@dataclass(frozen=True)
class Task:
    """What is computed with a model: two training mini-batches and an evaluation."""

    model: Model
    given: str  # "tensor", "wanting" a gradient, "numbers", "keyed" or "whole"
    micro_batches: int
    rows: tuple[int, int]
    way: str
    deferred: bool
    reduction: Reduction
    scale: float
    draws_in_loss: bool
    adds: bool  # the second mini-batch's gradients are added to the first's
    ahead: int  # rows of a data set that the mini-batches are slices of
    seed: int

    def inputs(self, step: int) -> Tree:
        generator, rows = torch.Generator().manual_seed(self.seed + step), self.rows[step]
        x = torch.randn(self.ahead + rows, self.model.width, generator=generator)[self.ahead :]
        match self.given:
            case "numbers":
                return torch.randint(11, (rows,), generator=generator)
            case "keyed":
                mask = torch.randint(2, (rows, 1), generator=generator)
                return {"x": x, "mask": mask, "side": x.sin(), "none": None, "flag": True}
            case "whole":
                return x, gpipe.Whole(torch.randn(6, self.model.width, generator=generator)[1:])
            case _:
                return x.requires_grad_(self.given == "wanting")

    def targets(self, step: int) -> dict[str, Tensor]:
        """The targets of a mini-batch; of some micro-batches no row may be valid."""
        generator, rows = torch.Generator().manual_seed(~self.seed + step), self.rows[step]
        valid = torch.rand(rows, generator=generator) < (0.5 if self.reduction is count_valid else 1)
        valid[-1] = True
        return {"y": torch.randn(self.ahead + rows, generator=generator)[self.ahead :], "valid": valid}

    def keys(self, step: int) -> dict[str, Any]:
        return {"micro_batches": self.micro_batches, "seed": self.seed, "step": step}

    def loss(self, output: Tree, target: Tree) -> Tensor:
        """A loss over all that the model gives, random if so wished."""
        if self.draws_in_loss:
            output = pytree.tree_map_only(Tensor, lambda x: F.dropout(x, 0.2) if x.is_floating_point() else x, output)
        return mean_of_valid(output, target)


def mean_of_valid(output: Tree, target: Any) -> Tensor:
    """A loss that is NaN for a micro-batch without valid rows."""
    leaves = [leaf for leaf in laws.tensors_in(output) if leaf.is_floating_point()]
    error = (sum(by_address(leaf).mean(1) for leaf in leaves) - target["y"] * factor_of(target["y"])) ** 2
    return (error * target["valid"]).sum() / target["valid"].sum()


def count_valid(target: Any) -> Tensor:
    return target["valid"].sum()


def root_of_rows(target: Any) -> float:
    return len(target["y"]) ** 0.5


def generate_task(draw: Random) -> Task:
    """A model and what to do with it: of one width, with modules and weights used twice, or of any widths."""
    knobs, way = draw.choice([MIXED, MIXED, VARIOUS]), draw.choice(["step", "call"])
    width = draw.choice([2, 3, 4, 5, 7, 8, 13, 33])
    given = draw.choice(["tensor", "tensor", "numbers", "keyed"]) if knobs is VARIOUS else "tensor"
    model = generate(draw, knobs, End(width, side=width if given == "keyed" else None))
    if given == "numbers":
        with laws.weights_of(width):
            model.layers.insert(0, nn.Embedding(11, width))
            model.kinds.insert(0, "embedding")
    stepping = way == "step"
    if model.whole:
        given = "whole"
    elif given == "tensor" and not stepping and not model.kinds[0].endswith("in place") and draw.random() < 0.5:
        given = "wanting"
    micro_batches = draw.randint(1, 5)
    least = 2 * micro_batches if model.norms else 1
    return Task(
        model=model,
        given=given,
        micro_batches=micro_batches,
        rows=(draw.randint(least, ROWS), draw.randint(least, ROWS)),
        way=way,
        deferred=draw.random() < 0.5,
        reduction=draw.choice(["mean", "sum", root_of_rows, count_valid]) if stepping else "mean",
        scale=draw.choice([1.0, 1024.0, 0.3]) if stepping else 1.0,
        draws_in_loss=stepping and draw.random() < 0.3,
        adds=draw.random() < 0.3,
        ahead=draw.choice([0, 1, 3]),
        seed=draw.randrange(2**31),
    )


@dataclass(frozen=True)
class Way:
    cut: tuple[int, ...]
    remat: tuple[str | int, ...]
    driver: str
    schedule: Named = "gpipe"
    weights: str = "device"


def generate_way(draw: Random, model: Model, partitions: int) -> Way | None:
    """A cut into so many partitions, if there is one."""
    choices = list(combinations(model.cuts(), partitions - 1))
    if not choices:
        return None
    ends = [0, *draw.choice(choices), len(model.layers)]
    kinds: list[str | int] = [*laws.REMATS, 1, 2]
    remat = tuple(draw.choice(kinds) for _ in range(partitions))
    return Way(tuple(b - a for a, b in pairwise(ends)), remat, draw.choice(["threads", "lockstep"]))


def whole(model: Model) -> Way:
    return Way((len(model.layers),), ("never",), "lockstep")


def twin(model: Model) -> Model:
    return replace(model, layers=twins(model.layers))


def run_pipe(task: Task, way: Way) -> Outcome:
    with make(twin(task.model), task, way) as pipe:
        return run(task, pipe)


def make(model: Model, task: Task, way: Way, **places: Any) -> gpipe.GPipe:
    return gpipe.GPipe(
        model.layers,
        way.cut,
        task.micro_batches,
        remat=way.remat,
        driver=way.driver,
        schedule=way.schedule,
        weights=way.weights,
        seed=task.seed,
        ties=model.ties,
        batch_norm="deferred" if task.deferred else "micro",
        **places,
    )


def run(task: Task, pipe: gpipe.GPipe) -> Outcome:
    def train(inputs: Tree, step: int) -> Tensor:
        given = inputs, task.targets(step), task.loss, task.way
        return laws.train(pipe, *given, reduction=task.reduction, scale=task.scale)

    return train_twice(pipe, task.inputs, train, lambda x: pipe(x, gather=True), adds=task.adds)


def run_plain(task: Task) -> Outcome:
    model = twin(task.model)
    root = nn.Sequential(*model.layers)
    for first, *others in model.ties:
        for name in others:
            path, _, leaf = name.rpartition(".")
            root.get_submodule(path)._parameters[leaf] = root.get_parameter(first)

    def train(inputs: Tree, step: int) -> Tensor:
        given = inputs, task.targets(step), task.loss, task.way
        with lent(model.layers) as layers:
            return laws.train_plainly(layers, *given, **task.keys(step), reduction=task.reduction, scale=task.scale)

    def evaluate(inputs: Tree) -> Tree:
        with lent(model.layers) as layers:
            return laws.plain_outputs(layers, inputs, **task.keys(2))

    return train_twice(root, task.inputs, train, evaluate, adds=task.adds)


# The law.


def is_statistic(task: Task) -> Callable[[str], bool]:
    """Whether something depends on what deferred BatchNorm gathers, which the plain loop does not do."""
    statistics = {
        f"{path}.{name}"
        for path, module in nn.Sequential(*task.model.layers).named_modules()
        if task.deferred and isinstance(module, _BatchNorm)
        for name in module._buffers
    }
    return lambda name: (
        bool(statistics) and (name.partition(" buffer ")[2] in statistics or name.startswith("evaluation"))
    )


def check(draw: Random) -> tuple[Task, dict[Way, list[str]]]:
    task = generate_task(draw)
    plain, one = run_plain(task), run_pipe(task, whole(task.model))
    found = {}
    for partitions in range(1, 5):
        way = generate_way(draw, task.model, partitions)
        if way is not None:
            outcome = run_pipe(task, way)
            found[way] = [f"{name}, unlike K=1" for name in differences(outcome, one)]
            unlike = differences(outcome, plain, leave_out=is_statistic(task))
            found[way] += [f"{name}, unlike the plain loop" for name in unlike]
    return task, found
