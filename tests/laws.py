"""Law 1: a pipeline gives the bits of the plain loop. The loop, the comparison, and random models to run both on."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils import _pytree as pytree

import gpipe
from gpipe.run.microbatch import Reduction
from gpipe.run.skips import Kept, run_layer

Tree: TypeAlias = object
LossFunction: TypeAlias = Callable[..., Tensor]

REMATS = ("always", "except_last", "never")


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations on one thread each, as in a pipe: bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_layers(layers: Sequence[nn.Module], value: Tree, *, seed: int, step: int, micro_batch: int) -> Tree:
    """The reference: each layer in turn, its randomness keyed by where and when it runs."""
    held: dict[str, Kept] = {}
    for index, layer in enumerate(layers):
        with gpipe.visit(seed, step, index, micro_batch):
            value = run_layer(layer, value, held)
    return value


@one_thread()
def plain_loop(
    layers: Sequence[nn.Module],
    inputs: Tree,
    targets: Tree,
    loss_fn: LossFunction,
    *,
    micro_batches: int,
    seed: int,
    step: int = 0,
    reduction: Reduction = "mean",
    scale: float = 1.0,
) -> Tensor:
    """What `pipe.step` does, one micro-batch after another: all forwards, then all backwards, newest first."""
    losses = []
    for m, (x, y) in enumerate(zip(parts_of(inputs, micro_batches), parts_of(targets, micro_batches), strict=True)):
        output = run_layers(layers, x, seed=seed, step=step, micro_batch=m)
        with gpipe.visit(seed, step, len(layers), m):
            losses.append(loss_fn(output, y))
    shares = shares_of(reduction, parts_of(targets, micro_batches))
    for loss, share in reversed(list(zip(losses, shares, strict=True))):
        if share and torch.is_grad_enabled():
            loss.backward(torch.full_like(loss, share * scale))
    total = sum(loss.detach() * share for loss, share in zip(losses, shares, strict=True) if share)
    assert isinstance(total, Tensor)
    return total


@one_thread()
def plain_call(
    layers: Sequence[nn.Module],
    inputs: Tree,
    targets: Tree,
    loss_fn: LossFunction,
    *,
    micro_batches: int,
    seed: int,
    step: int = 0,
) -> Tensor:
    """What `loss_fn(pipe(inputs), targets).backward()` does: one loss, then all backwards, newest first.

    One backward of all, without a pipeline, would add up what each use of a parameter gives, not each micro-batch.
    """
    parts = enumerate(parts_of(inputs, micro_batches))
    outputs = [run_layers(layers, x, seed=seed, step=step, micro_batch=m) for m, x in parts]
    roots = [[t for t in tensors_in(output) if t.requires_grad] for output in outputs]
    lent = [[root.detach().requires_grad_().view_as(root) for root in some] for some in roots]
    loss = loss_fn(joined(map(replaced, outputs, roots, lent)), targets)
    gradients = iter(torch.autograd.grad(loss, [tensor for some in lent for tensor in some], allow_unused=True))
    seeds = [[next(gradients) for _ in some] for some in roots]
    for some, seed_of in reversed(list(zip(roots, seeds, strict=True))):
        known = [(root, gradient) for root, gradient in zip(some, seed_of, strict=True) if gradient is not None]
        torch.autograd.backward([root for root, _ in known], [gradient for _, gradient in known])
    return loss.detach()


def replaced(tree: Tree, old: Sequence[Tensor], new: Sequence[Tensor]) -> Tree:
    """The value with some of its tensors replaced by others."""
    known = {id(tensor): other for tensor, other in zip(old, new, strict=True)}
    return pytree.tree_map(lambda leaf: known.get(id(leaf), leaf), tree)


def tensors_in(tree: Tree) -> list[Tensor]:
    """All tensors of a value."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def parts_of(tree: Tree, micro_batches: int) -> list[Tree]:
    """The micro-batches of a mini-batch: the first ones one row larger, none empty, their memory their own."""
    leaves, spec = pytree.tree_flatten(tree)
    parts = min(micro_batches, next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()))
    columns = [
        [part.clone() for part in leaf.tensor_split(parts)]
        if isinstance(leaf, Tensor) and leaf.dim()
        else [leaf] * parts
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[m] for column in columns], spec) for m in range(parts)]


def joined(parts: Iterable[Tree]) -> Tree:
    """The outputs of all micro-batches as one."""
    outputs = list(parts)
    if len(outputs) == 1:
        return outputs[0]
    return pytree.tree_map(
        lambda *column: torch.cat(column) if isinstance(column[0], Tensor) else column[0], *outputs
    )


def shares_of(reduction: Reduction, targets: Sequence[Tree]) -> list[float]:
    """The share w_i of each micro-batch in the loss."""
    if reduction == "sum":
        return [1.0] * len(targets)
    rows = [float(len(pytree.tree_leaves(target)[0])) for target in targets]
    raw = rows if reduction == "mean" else [float(reduction(target)) for target in targets]  # type: ignore[arg-type]
    return [weight / sum(raw) for weight in raw]


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors, or two absent ones, are the same to the last bit, NaN and the sign of zero included."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def assert_same_bits(pipe: nn.Module, reference: Sequence[nn.Module]) -> None:
    """A pipe's parameters, gradients and buffers are those of plain layers."""
    plain = nn.Sequential(*reference)
    parameters, buffers = dict(plain.named_parameters()), dict(plain.named_buffers())
    assert [name for name, _ in pipe.named_parameters()] == list(parameters)
    assert [name for name, _ in pipe.named_buffers()] == list(buffers)
    wrong = [f"{name}.grad" for name, p in pipe.named_parameters() if not same_bits(p.grad, parameters[name].grad)]
    wrong += [name for name, p in pipe.named_parameters() if not same_bits(p, parameters[name])]
    wrong += [name for name, b in pipe.named_buffers() if not same_bits(b, buffers[name])]
    assert not wrong, f"not the bits of the plain loop: {', '.join(wrong)}"


class OnFirst(nn.Module):
    """A layer that works on the first of several values and passes the others on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: dict[str, Tensor] | tuple[Tensor, Tensor]) -> Tree:
        if isinstance(value, dict):
            return {**value, "x": self.layer(value["x"])}
        return (self.layer(value[0]), *value[1:])


class Fork(nn.Module):
    """One tensor in, several values out: what they have to do with each other is its `kind`."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tree:
        y = self.linear(x)
        match self.kind:
            case "skip":
                return y, x
            case "same":
                return y, y
            case "chunks":
                return y.chunk(2, dim=1)
            case "turned":  # not contiguous, and a view
                return y.t().contiguous().t(), x[:, ::2]
            case _:  # integers, what needs no gradient, and what is no tensor
                mask = (x.detach().sum(1, keepdim=True) > 0).long()
                return {"x": y, "mask": mask, "side": x.detach() * 0.5, "none": None, "flag": True}


class Join(nn.Module):
    """Several values in, one tensor out."""

    def __init__(self, width: int, side: int, out: int) -> None:
        super().__init__()
        self.main = nn.Linear(width, out)
        self.side = nn.Linear(side, out)

    def forward(self, value: dict[str, Tensor] | tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(value, dict):
            x, side = value["x"], value["side"] * value["mask"]
        else:
            x, side = value
        out: Tensor = self.main(x) + self.side(side)
        return out


class Stash(nn.Module):
    """Keeps what it is given for later layers."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.stash = (name,)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.linear(x), {self.stash[0]: x}


class Pop(nn.Module):
    """Adds what earlier layers kept."""

    def __init__(self, widths: dict[str, int], width: int) -> None:
        super().__init__()
        self.pop = tuple(widths)
        self.linears = nn.ModuleDict({name: nn.Linear(size, width) for name, size in widths.items()})

    def forward(self, x: Tensor, **popped: Tensor) -> Tensor:
        for name, tensor in popped.items():
            x = x + self.linears[name](tensor) * tensor.mean(1, keepdim=True)
        return x


class Turned(nn.Module):
    """Gives a tensor that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.t().contiguous().t()


class EverySecond(nn.Module):
    """Gives a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2]


class Noise(nn.Module):
    """Draws, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) * torch.rand(x.shape[1])


class Drift(nn.Module):
    """Has a buffer that its forward changes and uses: in place, or by assignment."""

    mean: Tensor

    def __init__(self, width: int, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean.clone()
        self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return x * (1 + self.mean)


class Unused(nn.Module):
    """Has a parameter that has no say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass
class End:
    """The end of a model as it grows: what the next layer is given."""

    width: int
    side: int | None = None  # width of the second value, if there are several
    spare: bool = True  # whether no backward needs it, so that the next layer may work in place
    trains: bool = False  # whether there is something to train so far
    stashed: dict[str, int] = field(default_factory=dict)  # the width of what was kept under each name
    popped: set[str] = field(default_factory=set)


PLAIN = ("linear", "linear", "relu", "tanh", "gelu", "sigmoid", "layer_norm", "identity", "drift", "unused", "frozen")
RANDOM = ("dropout", "dropout_in_place", "alpha_dropout", "rrelu", "noise")
SHAPES = ("turned", "every_second", "spectral", "relu_in_place", "relu_in_place")
FORKS = ("skip", "same", "chunks", "turned", "keyed")


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
    kinds = [*PLAIN, *RANDOM, *SHAPES, *(["batch_norm"] * 3 if batch_norm else [])]
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
        case "dropout" | "alpha_dropout" | "identity" | "unused" | "dropout_in_place":
            end.spare = spare  # it may be the very tensor that it is given
    simple: dict[str, Callable[[], nn.Module]] = {
        "relu": nn.ReLU, "relu_in_place": lambda: nn.ReLU(inplace=True), "tanh": nn.Tanh, "gelu": nn.GELU,
        "sigmoid": nn.Sigmoid, "identity": nn.Identity, "unused": Unused, "turned": Turned, "noise": Noise,
        "dropout": lambda: nn.Dropout(0.4), "dropout_in_place": lambda: nn.Dropout(0.4, inplace=True),
        "alpha_dropout": lambda: nn.AlphaDropout(0.4), "rrelu": nn.RReLU,
    }  # fmt: skip
    return simple[kind]()


def random_model(draw: Random, end: End, *, batch_norm: bool) -> list[nn.Module]:
    """Up to seven layers and what it takes to end them well."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw.randrange(2**31))
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
    seed: int

    @property
    def stages(self) -> int:
        return len(self.remat)

    def inputs(self, step: int) -> Tree:
        generator, rows = torch.Generator().manual_seed(self.seed + step), self.rows[step]
        x = torch.randn(rows, self.width, generator=generator)
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
        return {"y": torch.randn(rows, generator=generator), "valid": valid}


def count_valid(target: Tree) -> Tensor:
    """A weight, for `reduction`."""
    assert isinstance(target, dict)
    valid: Tensor = target["valid"]
    return valid.sum()


def mean_of_valid(output: Tree, target: Tree) -> Tensor:
    """A loss that is NaN for a micro-batch without valid rows."""
    assert isinstance(target, dict)
    leaves = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    error = (sum(leaf.mean(1) for leaf in leaves) - target["y"]) ** 2
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
        seed=draw.randrange(2**31),
    )


cases = st.randoms(use_true_random=True).map(random_case)  # wide, where shrinking would make them narrow


def check_case(case: Case) -> None:
    """Two steps of training, with SGD and its momentum behind each, leave the bits of the plain loop."""
    reference = copy.deepcopy(case.layers)
    with gpipe.GPipe(
        case.layers, case.partitions, case.micro_batches, remat=case.remat, driver=case.driver, seed=case.seed
    ) as pipe:
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
    if case.way == "step":
        loss: Tensor = pipe.step(
            inputs, case.targets(step), mean_of_valid, reduction=case.reduction, scale=case.scale
        )
        return loss
    loss = mean_of_valid(pipe(inputs), case.targets(step))
    loss.backward()
    return loss


def run_plain(case: Case, layers: Sequence[nn.Module], inputs: Tree, step: int) -> Tensor:
    """One mini-batch through the plain loop."""
    given = layers, inputs, case.targets(step), mean_of_valid
    if case.way == "step":
        return plain_loop(
            *given,
            micro_batches=case.micro_batches,
            seed=case.seed,
            step=step,
            reduction=case.reduction,
            scale=case.scale,
        )
    return plain_call(*given, micro_batches=case.micro_batches, seed=case.seed, step=step)
