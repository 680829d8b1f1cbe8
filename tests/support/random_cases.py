"""Same bits: random models of plain layers, cut and run in any way."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gpipe
from gpipe.stages.microbatch import Reduction
from tests.support.addresses import by_address, factor_of, twins
from tests.support.plain_loop import (
    REMATS,
    Tree,
    assert_same_bits,
    same_bits,
    tensors_in,
    train,
    train_plainly,
    weights_of,
)
from tests.support.random_models import End, Knobs, generate


@dataclass(frozen=True)
class Case:
    """A model, how it is cut and run, and what it is given."""

    layers: list[nn.Module]
    partitions: int | list[int]
    micro_batches: int
    rows: tuple[int, int]  # of the first and the second mini-batch
    remat: tuple[str | int, ...]
    driver: str
    way: str  # "step" or "call"
    reduction: Reduction
    scale: float
    adds: bool  # the second mini-batch's gradients are added to the first's
    given: str  # "tensor", "wanting" a gradient, "numbers" or "keyed"
    width: int
    ahead: int  # rows of a data set that the mini-batches are slices of
    seed: int

    @property
    def stages(self) -> int:
        return len(self.remat)

    def pipe(self) -> gpipe.GPipe:
        """The layers as a pipe."""
        return gpipe.GPipe(
            self.layers, self.partitions, self.micro_batches, remat=self.remat, driver=self.driver, seed=self.seed
        )

    def inputs(self, step: int) -> Tree:
        generator, rows = torch.Generator().manual_seed(self.seed + step), self.rows[step]
        x = torch.randn(self.ahead + rows, self.width, generator=generator)[self.ahead :]
        if self.given == "numbers":
            return torch.randint(11, (rows,), generator=generator)
        if self.given == "keyed":
            mask = torch.randint(2, (rows, 1), generator=generator)
            return {"x": x, "mask": mask, "side": x.sin(), "none": None, "flag": True}
        return x.requires_grad_(self.given == "wanting")

    def targets(self, step: int) -> dict[str, Tensor]:
        generator, rows = torch.Generator().manual_seed(~self.seed + step), self.rows[step]
        valid = torch.rand(rows, generator=generator) < 0.5 if callable(self.reduction) else torch.ones(rows).bool()
        valid[-1] = True
        return {"y": torch.randn(self.ahead + rows, generator=generator)[self.ahead :], "valid": valid}


def count_valid(target: Tree) -> Tensor:
    """A weight, for `reduction`."""
    assert isinstance(target, dict)
    valid: Tensor = target["valid"]
    return valid.sum()


def mean_of_valid(output: Tree, target: Tree) -> Tensor:
    """A loss that is NaN for a micro-batch without valid rows."""
    assert isinstance(target, dict)
    leaves = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    error = (sum(by_address(leaf).mean(1) for leaf in leaves) - target["y"] * factor_of(target["y"])) ** 2
    loss: Tensor = (error * target["valid"]).sum() / target["valid"].sum()
    return loss


def random_case(draw: Random) -> Case:
    """Any model of these layers, cut, rematerialized and run in any way."""
    micro_batches = draw.randint(1, 5)
    most = draw.choice([9, 9, 9, 50])
    rows = draw.randint(1, most), draw.randint(1, most)
    way = draw.choice(["step", "call"])
    given = draw.choice(["tensor", "tensor", "numbers", "keyed", *(["wanting"] if way == "call" else [])])
    width = draw.choice([1, 2, 3, 5, 8, 9, 33])
    end = End(width, side=width if given == "keyed" else None, spare=given != "wanting")
    with weights_of(width):
        first = [nn.Embedding(11, width)] if given == "numbers" else []
    norms = all(n // min(micro_batches, n) > 1 for n in rows)
    layers = [*first, *generate(draw, Knobs((1, 8), reshapes=True, norms=norms, shares=False), end).layers]
    stages = draw.randint(1, min(4, len(layers)))
    kinds: list[str | int] = [*REMATS, 1, 2]
    cuts = [0, *sorted(draw.sample(range(1, len(layers)), stages - 1)), len(layers)]
    return Case(
        layers=layers,
        partitions=stages if draw.random() < 0.5 else [b - a for a, b in pairwise(cuts)],
        micro_batches=micro_batches,
        rows=rows,
        remat=tuple(draw.choice(kinds) for _ in range(stages)),
        driver=draw.choice(["threads", "lockstep"]),
        way=way,
        reduction=draw.choice(["mean", "sum", count_valid]) if way == "step" else "mean",
        scale=draw.choice([1.0, 1.0, 1024.0, 0.3]) if way == "step" else 1.0,
        adds=way == "step" and draw.random() < 0.3,
        given=given,
        width=width,
        ahead=draw.choice([0, 1, 3]),
        seed=draw.randrange(2**31),
    )


cases = st.randoms(use_true_random=True).map(random_case)  # wide, where shrinking would make them narrow


def check_case(case: Case) -> None:
    """Two steps of training, with SGD and its momentum behind each, leave the bits of the plain loop."""
    reference = twins(case.layers)
    with case.pipe() as pipe:
        models = (pipe, nn.Sequential(*reference))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9) for model in models]
        for step in (0, 1):
            given = case.inputs(step), case.inputs(step)
            loss, expected = run(case, pipe, given[0], step), run_plain(case, reference, given[1], step)
            assert same_bits(loss, expected), f"the loss is {loss} and, of the plain loop, {expected}"
            for x, y in zip(*map(tensors_in, given), strict=True):
                assert (x.grad is None and y.grad is None) or torch.equal(x.grad, y.grad), "a gradient of the inputs"
            assert_same_bits(pipe, reference)
            for optimizer in optimizers:
                optimizer.step()
                if not case.adds:
                    optimizer.zero_grad()
            assert_same_bits(pipe, reference)


def run(case: Case, pipe: gpipe.GPipe, inputs: Tree, step: int) -> Tensor:
    """One mini-batch through the pipe."""
    given = inputs, case.targets(step), mean_of_valid, case.way
    return train(pipe, *given, reduction=case.reduction, scale=case.scale)


def run_plain(case: Case, layers: Sequence[nn.Module], inputs: Tree, step: int) -> Tensor:
    """One mini-batch through the plain loop."""
    given = inputs, case.targets(step), mean_of_valid, case.way
    return train_plainly(
        layers,
        *given,
        micro_batches=case.micro_batches,
        seed=case.seed,
        step=step,
        reduction=case.reduction,
        scale=case.scale,
    )
