"""Law 1 over generated models that mix everything a layer may do.

Each model is run in each of K = 1, 2, 3, 4 (as far as it has layers), each time under a random cut, remat and driver,
and compared to the last bit with K = 1 in lockstep without rematerialization, and with the plain loop: losses,
gradients of parameters and inputs, parameters after optimizer steps, buffers, and a final evaluation. Only what
deferred BatchNorm gathers is not compared with the plain loop, nor what evaluation makes of it.

    python -m bench.law1_mixed [models] [first seed]
"""

import copy
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from random import Random
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils import _pytree as pytree

import gpipe
from bench import machine, report
from gpipe.run.microbatch import Reduction
from tests import laws
from tests.laws import Drift, Fork, Join, Noise, OnFirst, Pop, Stash, Tree, Turned, Unused

Place: TypeAlias = tuple[nn.Module, str]

ROWS = 16  # at most, in a mini-batch


# What layers may do, each of rows of W numbers in and out.


class StochasticDepth(nn.Module):
    """Leaves its layer out for some rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(len(x), 1) < 0.6
        out: Tensor = x + self.inner(x) * kept / 0.6
        return out


class LayerDrop(nn.Module):
    """Runs its layer or not, by chance: some micro-batches give its parameters no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if torch.rand(()) < 0.5 else x * 1.5


class Draws(nn.Module):
    """Draws in every way that torch has."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.rand(len(x), 1) + 0.1 * torch.randn(x.shape[1])
        x = x[:, torch.randperm(x.shape[1])] * torch.randint(1, 3, (len(x), 1))
        chosen = torch.multinomial(torch.ones(x.shape[1]), 1)
        noise = torch.empty_like(x).uniform_(-0.1, 0.1) + torch.normal(0.0, 0.1, x.shape)
        return x + noise + x[:, chosen] * torch.bernoulli(torch.full((len(x), 1), 0.5))


class Attention(nn.Module):
    """Attention over the rows' halves, with dropout on its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, 3 * 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x).view(len(x), 2, 3, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3 if self.training else 0.0)
        return x + mixed.sum(1)


class MultiheadAttention(nn.Module):
    """torch's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pair = torch.stack([x, x.tanh()], 1)
        mixed: Tensor = self.attention(pair, pair, pair, need_weights=False)[0]
        return mixed.sum(1)


class Recurrent(nn.Module):
    """An LSTM or GRU of two layers with dropout between them."""

    def __init__(self, width: int, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.cells = kind(width, width, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cells(torch.stack([x, -x], 1))[0]
        return out.sum(1)


class Images(nn.Module):
    """A convolution, with a BatchNorm2d and a dropout of whole channels."""

    def __init__(self, width: int, *, norm: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Unflatten(1, (1, 1, width)),
            nn.Conv2d(1, 2, (1, 3), padding=(0, 1)),
            nn.BatchNorm2d(2) if norm else nn.Identity(),
            nn.Dropout2d(0.3),
            nn.Conv2d(2, 1, 1),
            nn.Flatten(),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class LowRank(nn.Module):
    """A frozen layer with a small trained one beside it (LoRA)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 1, bias=False)
        self.up = nn.Linear(1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


class Experts(nn.Module):
    """Uses one parameter for some micro-batches and another for others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x.detach().abs().sum() * 1000) % 3
        out: Tensor = self.experts[chosen](x)
        return out


class Block(nn.Module):
    """A residual block of several modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class TakesWhole(nn.Module):
    """The first layer of a model with a table that every micro-batch takes whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        x, table = value
        out: Tensor = self.linear(x) + table.mean(0)
        return out


def half_frozen(width: int) -> nn.Module:
    layer = Block(width)
    layer.inner[1].requires_grad_(False)
    return layer


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda w: nn.Linear(w, w),
    "block": Block,
    "relu": lambda w: nn.ReLU(),
    "tanh": lambda w: nn.Tanh(),
    "gelu": lambda w: nn.GELU(),
    "layer norm": lambda w: nn.LayerNorm(w),
    "identity": lambda w: nn.Identity(),
    "turned": lambda w: Turned(),
    "in place": lambda w: nn.ReLU(inplace=True),
    "dropout in place": lambda w: nn.Dropout(0.3, inplace=True),
    "dropout": lambda w: nn.Dropout(0.3),
    "alpha dropout": lambda w: nn.AlphaDropout(0.3),
    "feature dropout": lambda w: nn.Sequential(nn.Unflatten(1, (w, 1)), nn.Dropout1d(0.3), nn.Flatten()),
    "feature alpha dropout": lambda w: nn.Sequential(
        nn.Unflatten(1, (w, 1)), nn.FeatureAlphaDropout(0.3), nn.Flatten()
    ),
    "rrelu": lambda w: nn.RReLU(),
    "noise": lambda w: Noise(),
    "draws": lambda w: Draws(),
    "stochastic depth": StochasticDepth,
    "layer drop": LayerDrop,
    "attention": Attention,
    "multihead attention": MultiheadAttention,
    "lstm": lambda w: Recurrent(w, nn.LSTM),
    "gru": lambda w: Recurrent(w, nn.GRU),
    "images": lambda w: Images(w, norm=False),
    "spectral norm": lambda w: spectral_norm(nn.Linear(w, w)),
    "weight norm": lambda w: weight_norm(nn.Linear(w, w)),
    "drift in place": lambda w: Drift(w, in_place=True),
    "drift by assignment": lambda w: Drift(w, in_place=False),
    "frozen": lambda w: nn.Linear(w, w).requires_grad_(False),
    "half frozen": half_frozen,
    "low rank": LowRank,
    "experts": Experts,
    "unused": lambda w: Unused(),
    "batch norm": lambda w: nn.BatchNorm1d(w),
    "batch norm, cumulative": lambda w: nn.BatchNorm1d(w, momentum=None),
    "batch norm of images": lambda w: Images(w, norm=True),
    "batch norm, frozen": lambda w: nn.BatchNorm1d(w).requires_grad_(False),
    "batch norm, no statistics": lambda w: nn.BatchNorm1d(w, track_running_stats=False),
}
FORKS = ("skip", "same", "keyed", "turned")
SPOILED = {"relu", "tanh", "turned", "in place", "rrelu", "noise", "draws"}  # a backward needs what these give
KEEPING = {"identity", "unused", "dropout", "dropout in place"}  # may give the very tensor that they are given
UNSURE = {"layer drop", "unused"}  # some micro-batch may train nothing in them


@dataclass
class Model:
    """A generated model."""

    layers: list[nn.Module]
    width: int
    kinds: list[str]
    whole: bool = False
    ties: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def norms(self) -> bool:
        """Whether it has a BatchNorm, so that a micro-batch needs two rows."""
        return any(isinstance(m, _BatchNorm) for layer in self.layers for m in layer.modules())

    def cuts(self) -> list[int]:
        """Where it may be cut: not between two uses of a module that keeps state."""
        allowed = set(range(1, len(self.layers)))
        uses: dict[nn.Module, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for module in layer.modules():
                if module._buffers:
                    uses.setdefault(module, []).append(index)
        for places in uses.values():
            allowed -= set(range(places[0] + 1, places[-1] + 1))
        return sorted(allowed)


def generate(draw: Random) -> Model:
    """A model of three to nine layers."""
    width = draw.choice([2, 3, 4, 8])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw.randrange(2**31))
        model = Model([], width, [])
        if draw.random() < 0.15:
            model.whole = True
            _add(model, "whole", TakesWhole(width))
        _grow(draw, model, draw.randint(3, 9))
        pairs = zip(model.kinds, model.layers, strict=True)
        sure = [layer for kind, layer in pairs if kind.removeprefix("again: ") not in UNSURE]
        if not any(p.requires_grad for layer in sure for p in layer.parameters()):
            _add(model, "linear", nn.Linear(width, width))
        if draw.random() < 0.4:
            _share(draw, model)
    return model


def _add(model: Model, kind: str, layer: nn.Module) -> None:
    model.layers.append(layer)
    model.kinds.append(kind)


def _grow(draw: Random, model: Model, layers: int) -> None:
    width, paired, spare = model.width, False, True
    side = 0
    stashed: dict[str, int] = {}
    popped: set[str] = set()
    repeatable: list[tuple[str, nn.Module]] = []
    while len(model.layers) < layers:
        dice = draw.random()
        if paired and dice < 0.5:
            _add(model, "join", Join(width, side, width))
            paired, spare = False, True
        elif not paired and dice < 0.1:
            fork = draw.choice(FORKS)
            side = (width + 1) // 2 if fork == "turned" else width
            _add(model, f"fork, {fork}", Fork(fork, width))
            paired, spare = True, fork in ("skip", "keyed")
        elif not paired and dice < 0.2:
            name = f"e{len(stashed)}"
            stashed[name] = width
            _add(model, "stash", Stash(name, width))
            spare = True
        elif not paired and stashed and dice < 0.35:
            chosen = draw.sample(sorted(stashed), draw.randint(1, len(stashed)))
            popped |= set(chosen)
            _add(model, "pop", Pop(dict.fromkeys(chosen, width), width))
            spare = True
        elif not paired and repeatable and dice < 0.45:
            kind, layer = draw.choice(repeatable)
            _add(model, f"again: {kind}", layer)
            spare = kind not in SPOILED and (spare or kind not in KEEPING)
        else:
            kind = draw.choice([kind for kind in KINDS if spare or not kind.endswith("in place") or "drift" in kind])
            layer = KINDS[kind](width)
            if not paired and not kind.endswith("in place"):
                repeatable.append((kind, layer))
            _add(model, kind, OnFirst(layer) if paired else layer)
            spare = kind not in SPOILED and (spare or kind not in KEEPING)
    if paired:
        _add(model, "join", Join(width, side, width))
    waiting = sorted(set(stashed) - popped)
    if waiting:
        _add(model, "pop", Pop(dict.fromkeys(waiting, width), width))


def _share(draw: Random, model: Model) -> None:
    """Makes two or three parameters of one shape in different layers one, by identity or by `ties`."""
    root = nn.Sequential(*model.layers)
    by_shape: dict[object, list[tuple[int, str, Place]]] = {}
    seen: set[nn.Module] = set()
    for index, layer in enumerate(model.layers):
        for path, module in layer.named_modules(prefix=str(index)):
            if module in seen:
                continue
            seen.add(module)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    key = (tuple(parameter.shape), parameter.requires_grad)
                    by_shape.setdefault(key, []).append((index, f"{path}.{name}", (module, name)))
    groups = [group for group in by_shape.values() if len({index for index, _, _ in group}) > 1]
    if not groups:
        return
    group = draw.choice(groups)
    chosen = draw.sample(group, min(len(group), draw.choice([2, 2, 3])))
    chosen.sort(key=lambda item: item[0])
    if draw.random() < 0.5:
        model.ties.append(tuple(name for _, name, _ in chosen))
        model.kinds.append("tied")
    else:
        first = root.get_parameter(chosen[0][1])
        for _, _, (module, name) in chosen[1:]:
            module._parameters[name] = first
        model.kinds.append("shared")


@dataclass(frozen=True)
class Way:
    """How a model is cut and run."""

    cut: tuple[int, ...]
    remat: tuple[str, ...]
    driver: str


@dataclass(frozen=True)
class Task:
    """What is computed with a model: two training mini-batches and an evaluation."""

    model: Model
    micro_batches: int
    rows: tuple[int, int]
    way: str
    deferred: bool
    reduction: Reduction
    scale: float
    draws_in_loss: bool
    wanting: bool
    adds: bool
    seed: int

    def inputs(self, step: int) -> Tree:
        """The inputs of a mini-batch."""
        generator = torch.Generator().manual_seed(self.seed + step)
        x = torch.randn(self.rows[step], self.model.width, generator=generator)
        x.requires_grad_(self.wanting)
        if not self.model.whole:
            return x
        return x, gpipe.Whole(torch.randn(5, self.model.width, generator=generator))

    def targets(self, step: int) -> Tensor:
        """The targets of a mini-batch."""
        return torch.randn(self.rows[step], generator=torch.Generator().manual_seed(~self.seed + step))

    def loss(self, output: Tree, target: Tree) -> Tensor:
        """A loss over all that the model gives, random if so wished."""
        assert isinstance(target, Tensor)
        assert isinstance(output, Tensor)
        if self.draws_in_loss:
            output = F.dropout(output, 0.2)
        return F.smooth_l1_loss(output.mean(1), target)


def root_of_rows(target: Tree) -> float:
    """A weight, for `reduction`."""
    assert isinstance(target, Tensor)
    return len(target) ** 0.5


def generate_task(draw: Random) -> Task:
    """A model and what to do with it."""
    model = generate(draw)
    micro_batches = draw.randint(1, 5)
    least = 2 * micro_batches if model.norms else 1
    way = draw.choice(["step", "call"])
    stepping = way == "step"
    wanting = not stepping and not model.kinds[0].endswith("in place") and draw.random() < 0.5
    return Task(
        model=model,
        micro_batches=micro_batches,
        rows=(draw.randint(least, ROWS), draw.randint(least, ROWS)),
        way=way,
        deferred=draw.random() < 0.5,
        reduction=draw.choice(["mean", "sum", root_of_rows]) if stepping else "mean",
        scale=draw.choice([1.0, 1024.0]) if stepping else 1.0,
        draws_in_loss=stepping and draw.random() < 0.3,
        wanting=wanting,
        adds=draw.random() < 0.3,
        seed=draw.randrange(2**31),
    )


def generate_way(draw: Random, model: Model, partitions: int) -> Way | None:
    """A cut into so many partitions, if there is one."""
    choices = list(combinations(model.cuts(), partitions - 1))
    if not choices:
        return None
    ends = [0, *draw.choice(choices), len(model.layers)]
    remat = tuple(draw.choice(laws.REMATS) for _ in range(partitions))
    return Way(tuple(b - a for a, b in pairwise(ends)), remat, draw.choice(["threads", "lockstep"]))


Outcome: TypeAlias = dict[str, Tensor | None]
"""All that a run leaves, by name."""


def run_pipe(task: Task, way: Way) -> Outcome:
    """A run through a pipe."""
    model = copy.deepcopy(task.model)
    with gpipe.GPipe(
        model.layers,
        way.cut,
        task.micro_batches,
        remat=way.remat,
        driver=way.driver,
        seed=task.seed,
        ties=model.ties,
        deferred_batch_norm=task.deferred,
    ) as pipe:

        def train(inputs: Tree, step: int) -> Tensor:
            if task.way == "step":
                loss: Tensor = pipe.step(
                    inputs, task.targets(step), task.loss, reduction=task.reduction, scale=task.scale
                )
                return loss
            loss = task.loss(pipe(inputs), task.targets(step))
            loss.backward()
            return loss

        return _outcome(task, pipe, train, pipe)


def run_plain(task: Task) -> Outcome:
    """The same in plain PyTorch."""
    model = copy.deepcopy(task.model)
    root = nn.Sequential(*model.layers)
    for first, *others in model.ties:
        for name in others:
            path, _, leaf = name.rpartition(".")
            root.get_submodule(path)._parameters[leaf] = root.get_parameter(first)
    leaves = own_leaves(model.layers)
    lent = [Lent(layer, leaves[index]) for index, layer in enumerate(model.layers)]

    def train(inputs: Tree, step: int) -> Tensor:
        given = lent, inputs, task.targets(step), task.loss
        if task.way == "step":
            loss = laws.plain_loop(
                *given,
                micro_batches=task.micro_batches,
                seed=task.seed,
                step=step,
                reduction=task.reduction,
                scale=task.scale,
            )
        else:
            loss = laws.plain_call(*given, micro_batches=task.micro_batches, seed=task.seed, step=step)
        add_up(leaves)
        return loss

    def evaluate(inputs: Tree) -> Tree:
        parts = laws.parts_of(inputs, task.micro_batches)
        with laws.one_thread():
            return laws.joined(
                laws.run_layers(lent, part, seed=task.seed, step=2, micro_batch=m) for m, part in enumerate(parts)
            )

    return _outcome(task, root, train, evaluate)


def _outcome(
    task: Task, root: nn.Module, train: Callable[[Tree, int], Tensor], evaluate: Callable[[Tree], Tree]
) -> Outcome:
    """Trains two mini-batches, evaluates a third, and notes everything."""
    found: Outcome = {}
    optimizer = torch.optim.SGD(root.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for step in (0, 1):
        inputs = task.inputs(step)
        found[f"{step} loss"] = train(inputs, step).detach()
        for at, tensor in enumerate(laws.tensors_in(inputs)):
            found[f"{step} input {at}"] = tensor.grad
        for name, p in root.named_parameters():
            found[f"{step} grad {name}"] = None if p.grad is None else p.grad.clone()
        optimizer.step()
        if not task.adds:
            optimizer.zero_grad()
        found |= {f"{step} parameter {name}": p.detach().clone() for name, p in root.named_parameters()}
        found |= {f"{step} buffer {name}": b.clone() for name, b in root.named_buffers()}
    root.eval()
    with torch.no_grad():
        output = evaluate(task.inputs(0))
    assert isinstance(output, Tensor)
    return {**found, "evaluation": output}


# Shared weights in plain PyTorch: each layer's sums first, then the layers in their order.


def own_leaves(layers: Sequence[nn.Module]) -> list[dict[Place, Tensor]]:
    """For each layer, a leaf of its own for each parameter that other layers use too."""
    users: dict[nn.Parameter, dict[int, list[Place]]] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    users.setdefault(parameter, {}).setdefault(index, []).append((module, name))
    leaves: list[dict[Place, Tensor]] = [{} for _ in layers]
    for shared, by_layer in users.items():
        if len(by_layer) > 1:
            for index, places in by_layer.items():
                leaf = shared.detach().requires_grad_(shared.requires_grad)
                leaves[index] |= dict.fromkeys(places, leaf)
    return leaves


def add_up(leaves: Sequence[Mapping[Place, Tensor]]) -> None:
    """Adds the gradients of the leaves to those of the parameters."""
    totals: dict[nn.Parameter, Tensor] = {}
    for of_layer in leaves:
        for (module, name), leaf in of_layer.items():
            parameter = module._parameters[name]
            if leaf.grad is not None and parameter is not None:
                totals[parameter] = totals[parameter] + leaf.grad if parameter in totals else leaf.grad
            leaf.grad = None
    for shared, total in totals.items():
        shared.grad = total if shared.grad is None else shared.grad + total


class Lent(nn.Module):
    """A layer that works on leaves of its own; it takes `Whole` as a micro-batch does."""

    def __init__(self, layer: nn.Module, leaves: Mapping[Place, Tensor]) -> None:
        super().__init__()
        self.layer = [layer]
        self.leaves = leaves
        self.stash = getattr(layer, "stash", ())
        self.pop = () if isinstance(layer, nn.Sequential) else getattr(layer, "pop", ())

    def forward(self, value: Tree, **popped: Tensor) -> Tree:
        """Runs the layer."""
        value = pytree.tree_map_only(gpipe.Whole, lambda whole: whole.tensor, value)
        with self._in_place():
            return self.layer[0](value, **popped)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        own = {(module, name): module._parameters[name] for module, name in self.leaves}
        try:
            _put(self.leaves)
            yield
        finally:
            _put(own)


def _put(parameters: Mapping[Place, Tensor | None]) -> None:
    for (module, name), parameter in parameters.items():
        module._parameters[name] = parameter  # type: ignore[assignment]  # any tensor will do
    for module in {module for module, _ in parameters}:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, weight) for weight in module._flat_weights_names]


# The law.


def differences(one: Outcome, other: Outcome, *, leave_out: Callable[[str], bool] = lambda name: False) -> list[str]:
    """What is not the same to the last bit."""
    assert list(one) == list(other), "not the same names"
    return [name for name in one if not leave_out(name) and not laws.same_bits(one[name], other[name])]


def check(draw: Random) -> tuple[Task, dict[Way, list[str]]]:
    """One model in all its ways: what differs in each."""
    task = generate_task(draw)
    statistics = {
        f"{path}.{name}"
        for path, module in nn.Sequential(*task.model.layers).named_modules()
        if task.deferred and isinstance(module, _BatchNorm)
        for name in module._buffers
    }

    def unlike(name: str) -> bool:
        return name.partition(" buffer ")[2] in statistics or bool(statistics and name == "evaluation")

    plain = run_plain(task)
    one = run_pipe(task, Way((len(task.model.layers),), ("never",), "lockstep"))
    found = {}
    for partitions in range(1, 5):
        way = generate_way(draw, task.model, partitions)
        if way is not None:
            outcome = run_pipe(task, way)
            found[way] = [f"{name}, unlike K=1" for name in differences(outcome, one)]
            found[way] += [f"{name}, unlike the plain loop" for name in differences(outcome, plain, leave_out=unlike)]
    return task, found


def main(models: int = 400, first: int = 0) -> None:
    """Checks so many models, and keeps what came of it."""
    logging.getLogger("gpipe").setLevel(logging.ERROR)  # the models are not meant to be healthy
    began = time.monotonic()
    count: Counter[str] = Counter()
    bad: list[dict[str, Any]] = []
    for seed in range(first, first + models):
        task, found = check(Random(seed))
        count.update({f"with {kind.removeprefix('again: ')}" for kind in task.model.kinds})
        if any(kind.startswith("again: ") for kind in task.model.kinds):
            count["with a layer used twice"] += 1
        for way, wrong in found.items():
            count["configurations"] += 1
            count[f"K = {len(way.cut)}"] += 1
            count[f"driver {way.driver}"] += 1
            count[f"by {task.way}"] += 1
            count[f"M = {task.micro_batches}"] += 1
            count["uneven micro-batches"] += any(rows % min(task.micro_batches, rows) for rows in task.rows)
            count[f"deferred_batch_norm={task.deferred}"] += 1
            count.update({f"remat {remat}" for remat in way.remat})
            if wrong:
                bad.append({"seed": seed, "way": repr(way), "task": task.way, "differs": wrong[:8]})
                print(seed, way, task.model.kinds, wrong[:4])
        if (seed - first) % 50 == 49:
            print(f"{seed - first + 1} models, {count['configurations']} configurations, {len(bad)} differ")
    facts = {**machine.facts(), "seconds": f"{time.monotonic() - began:.0f}"}
    rows = [(name, str(count[name])) for name in sorted(count) if not name.startswith("with ")]
    kinds = [(name.removeprefix("with "), str(count[name])) for name in sorted(count) if name.startswith("with ")]
    text = (
        f"# Law 1 over models that mix everything\n\n{report.describe(facts)}\n\n"
        f"{count['configurations']} configurations of {models} models (seeds {first} to {first + models - 1}), "
        f"**{len(bad)} differ**, in {facts['seconds']} s. Each was compared, to the last bit, with K = 1 in lockstep "
        f"without rematerialization and with the plain loop: losses, gradients of parameters and inputs, parameters "
        f"after SGD with momentum and weight decay, buffers, two mini-batches and an evaluation.\n\n"
        f"{report.table(('configurations', 'count'), rows)}\n\n{report.table(('models with', 'count'), kinds)}"
    )
    report.write("law1_mixed", text, {"facts": facts, "counts": dict(sorted(count.items())), "differ": bad})
    sys.exit(bool(bad))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
