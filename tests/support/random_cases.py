"""Law 1: random models of plain layers, cut and run in any way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils import _pytree as pytree

import gpipe
from gpipe.values.microbatch import Reduction
from tests.support.addresses import AddressedBuffer, Behind, ByAddress, Third, by_address, factor_of, misplaced, twins
from tests.support.odd_layers import Drift, EverySecond, Fork, Join, Noise, OnFirst, Pop, Stash, Turned, Unused
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

PLAIN = ("linear", "linear", "relu", "tanh", "gelu", "sigmoid", "layer_norm", "identity", "drift", "unused", "frozen")
RANDOM = ("dropout", "dropout_in_place", "alpha_dropout", "rrelu", "noise")
SHAPES = ("turned", "every_second", "spectral", "relu_in_place", "relu_in_place")
ADDRESSES = ("by_address", "by_address", "third", "behind", "addressed_buffer", "misplaced")
FORKS = ("skip", "same", "chunks", "turned", "keyed")


@dataclass
class End:
    """The end of a model as it grows: what the next layer is given."""

    width: int
    side: int | None = None  # width of the second value, if there are several
    spare: bool = True  # whether no backward needs it, so that the next layer may work in place
    trains: bool = False  # whether there is something to train so far
    stashed: dict[str, int] = field(default_factory=dict)  # the width of what was kept under each name
    popped: set[str] = field(default_factory=set)


def grow(draw: Random, end: End, *, batch_norm: bool) -> nn.Module:
    """One more layer; `end` is moved behind it."""
    if end.side is not None:
        if draw.random() < 0.4:
            return grow_join(draw, end)
        return OnFirst(grow_plain(draw, end, batch_norm=batch_norm))
    dice = draw.random()
    if dice < 0.15:
        return grow_fork(draw, end)
    if dice < 0.25:
        name = f"e{len(end.stashed)}"
        end.stashed[name] = end.width
        end.spare, end.trains = True, True
        return Stash(name, end.width)
    if end.stashed and dice < 0.5:
        return grow_pop(end, draw.sample(sorted(end.stashed), draw.randint(1, len(end.stashed))))
    return grow_plain(draw, end, batch_norm=batch_norm)


def grow_fork(draw: Random, end: End) -> nn.Module:
    kind = draw.choice([kind for kind in FORKS if end.width > 1 or kind != "chunks"])
    fork = Fork(kind, end.width)
    end.side = {"chunks": end.width // 2, "turned": (end.width + 1) // 2}.get(kind, end.width)
    end.width -= end.side if kind == "chunks" else 0
    end.spare, end.trains = kind in ("skip", "same", "keyed"), True
    return fork


def grow_join(draw: Random, end: End) -> nn.Module:
    assert end.side is not None
    join = Join(end.width, end.side, out := draw.randint(1, 9))
    end.width, end.side, end.spare, end.trains = out, None, True, True
    return join


def grow_pop(end: End, names: Sequence[str]) -> nn.Module:
    end.popped |= set(names)
    end.spare, end.trains = True, True
    return Pop({name: end.stashed[name] for name in names}, end.width)


def grow_plain(draw: Random, end: End, *, batch_norm: bool) -> nn.Module:
    kinds = [*PLAIN, *RANDOM, *SHAPES, *ADDRESSES, *(["batch_norm"] * 3 if batch_norm else [])]
    kind = draw.choice([k for k in kinds if end.spare or not k.endswith("in_place")])
    width, spare = end.width, end.spare
    end.spare = kind not in ("relu", "relu_in_place", "tanh", "sigmoid", "turned", "every_second", "rrelu")
    match kind:
        case "linear" | "frozen" | "spectral":
            end.width = draw.choice([1, 2, 3, 5, 7, 8, 9, 33])
            end.trains = end.trains or kind != "frozen"
            linear = nn.Linear(width, end.width, bias=draw.random() < 0.8)
            return spectral_norm(linear) if kind == "spectral" else linear.requires_grad_(kind == "linear")
        case "layer_norm":
            return nn.LayerNorm(width)
        case "batch_norm":
            return nn.BatchNorm1d(width, momentum=draw.choice([0.1, None]))
        case "every_second":
            end.width = (width + 1) // 2
            return EverySecond()
        case "drift":
            return Drift(width, in_place=draw.random() < 0.5)
        case "third" | "behind" | "misplaced":
            end.trains = True
        case "dropout" | "alpha_dropout" | "identity" | "unused" | "dropout_in_place":
            end.spare = spare  # it may be the very tensor that it is given
    simple: dict[str, Callable[[], nn.Module]] = {
        "relu": nn.ReLU, "relu_in_place": lambda: nn.ReLU(inplace=True), "tanh": nn.Tanh, "gelu": nn.GELU,
        "sigmoid": nn.Sigmoid, "identity": nn.Identity, "unused": Unused, "turned": Turned, "noise": Noise,
        "dropout": lambda: nn.Dropout(0.4), "dropout_in_place": lambda: nn.Dropout(0.4, inplace=True),
        "alpha_dropout": lambda: nn.AlphaDropout(0.4), "rrelu": nn.RReLU, "by_address": ByAddress,
        "third": lambda: Third(width), "behind": lambda: Behind(width),
        "addressed_buffer": lambda: AddressedBuffer(width), "misplaced": lambda: misplaced(nn.Linear(width, width)),
    }  # fmt: skip
    return simple[kind]()


def random_model(draw: Random, end: End, *, batch_norm: bool) -> list[nn.Module]:
    """Up to seven layers and what it takes to end them well."""
    with weights_of(draw.randrange(2**31)):
        layers = [grow(draw, end, batch_norm=batch_norm) for _ in range(draw.randint(1, 7))]
        waiting = sorted(set(end.stashed) - end.popped)
        if end.side is not None and (waiting or draw.random() < 0.5):
            layers.append(grow_join(draw, end))
        if waiting:
            layers.append(grow_pop(end, waiting))
        if not end.trains:
            last = nn.Linear(end.width, 3)
            layers.append(last if end.side is None else OnFirst(last))
    return layers


@dataclass(frozen=True)
class Case:
    """A model, how it is cut and run, and what it is given."""

    layers: list[nn.Module]
    partitions: int | list[int]
    micro_batches: int
    rows: tuple[int, int]  # of the first and the second mini-batch
    remat: tuple[str, ...]
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
    end.trains = bool(first)
    layers = [*first, *random_model(draw, end, batch_norm=all(n // min(micro_batches, n) > 1 for n in rows))]
    stages = draw.randint(1, min(4, len(layers)))
    cuts = [0, *sorted(draw.sample(range(1, len(layers)), stages - 1)), len(layers)]
    return Case(
        layers=layers,
        partitions=stages if draw.random() < 0.5 else [b - a for a, b in pairwise(cuts)],
        micro_batches=micro_batches,
        rows=rows,
        remat=tuple(draw.choice(REMATS) for _ in range(stages)),
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
