"""Jobs of law 1: random models, and stories, through a pipe over processes; what they leave, as digests."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from bench.law1_mixed import Task, generate_task, generate_way
from tests import laws
from tests.laws import REMATS, Case, Pop, Stash, Tree, one_thread

Outcome: TypeAlias = dict[str, Tensor | None]
"""All that a run leaves, by name."""
Digests: TypeAlias = dict[str, str]


def digest(tensor: Tensor | None) -> str:
    """The same for the same bits, dtype and shape."""
    if tensor is None:
        return "none"
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha1(data).hexdigest()[:16]}"


def digests(outcome: Outcome) -> Digests:
    return {name: digest(tensor) for name, tensor in outcome.items()}


def note(found: Outcome, root: nn.Module, when: object) -> None:
    """Adds the gradients, parameters and buffers of a model, or of this rank's part of it."""
    found |= {f"{when} grad {name}": p.grad if p.grad is None else p.grad.clone() for name, p in named(root)}
    found |= {f"{when} parameter {name}": p.detach().clone() for name, p in named(root)}
    found |= {f"{when} buffer {name}": b.clone() for name, b in root.named_buffers()}


def named(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(root.named_parameters())


def optimizer_of(root: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    """An optimizer also of a stage that has nothing to train."""
    how: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01} if kind is torch.optim.SGD else {}
    return kind([*root.parameters()] or [torch.zeros(1)], **{"lr": 0.05, **how})


# Random models. The names are those of `bench.law1_mixed`.


def train_twice(
    root: nn.Module,
    inputs_of: Callable[[int], Tree],
    train: Callable[[Tree, int], Tensor],
    evaluate: Callable[[Tree], Tree],
    *,
    adds: bool,
) -> Outcome:
    """Trains two mini-batches, evaluates a third, and notes everything."""
    found: Outcome = {}
    optimizer = optimizer_of(root)
    for step in (0, 1):
        inputs = inputs_of(step)
        found[f"{step} loss"] = train(inputs, step).detach()
        for at, tensor in enumerate(laws.tensors_in(inputs)):
            found[f"{step} input {at}"] = tensor.grad
        found |= {f"{step} grad {name}": None if p.grad is None else p.grad.clone() for name, p in named(root)}
        optimizer.step()
        if not adds:
            optimizer.zero_grad()
        found |= {f"{step} parameter {name}": p.detach().clone() for name, p in named(root)}
        found |= {f"{step} buffer {name}": b.clone() for name, b in root.named_buffers()}
    root.eval()
    with torch.no_grad():
        outputs = laws.tensors_in(evaluate(inputs_of(0)))
    return found | {"evaluation" + f" {at}" * bool(at): output for at, output in enumerate(outputs)}


def own_inputs(found: Outcome, rank: int) -> Outcome:
    """Without the gradients of inputs, which only the first stage has."""
    return {name: tensor for name, tensor in found.items() if not rank or " input " not in name}


def task_of(seed: int) -> Task:
    return generate_task(Random(seed))


def mixed(rank: int, world: int, seeds: list[int]) -> list[Digests | None]:
    """Models of `bench.law1_mixed` cut into as many partitions as there are ranks, if they can be."""
    return [run_task(task_of(seed), Random(f"{seed} {world}"), rank, world) for seed in seeds]


def run_task(task: Task, draw: Random, rank: int, world: int) -> Digests | None:
    way = generate_way(draw, task.model, world)
    if way is None:
        return None
    pipe = gpipe.GPipe(
        task.model.layers,
        way.cut,
        task.micro_batches,
        remat=way.remat,
        driver="process",
        seed=task.seed,
        ties=task.model.ties,
        deferred_batch_norm=task.deferred,
    )

    def train(inputs: Tree, step: int) -> Tensor:
        given = task.targets(step)
        if task.way == "step":
            return pipe.step(inputs, given, task.loss, reduction=task.reduction, scale=task.scale)
        loss = task.loss(pipe(inputs, gather=True), given)
        loss.backward()
        return loss

    with pipe:
        found = train_twice(pipe, task.inputs, train, lambda x: pipe(x, gather=True), adds=task.adds)
    return digests(own_inputs(found, rank))


def case_of(seed: int) -> Case:
    with weights_of(seed):
        return laws.random_case(Random(seed))


def various(rank: int, world: int, seeds: list[int]) -> list[Digests | None]:
    """Models of `tests.laws`, likewise."""
    return [run_case(case_of(seed), Random(f"{seed} {world}"), rank, world) for seed in seeds]


def run_case(case: Case, draw: Random, rank: int, world: int) -> Digests | None:
    if len(case.layers) < world:
        return None
    remat = [draw.choice(REMATS) for _ in range(world)]
    pipe = gpipe.GPipe(case.layers, world, case.micro_batches, remat=remat, driver="process", seed=case.seed)

    def train(inputs: Tree, step: int) -> Tensor:
        if case.way == "step":
            return laws.run(case, pipe, inputs, step)
        loss = laws.mean_of_valid(pipe(inputs, gather=True), case.targets(step))
        loss.backward()
        return loss

    with pipe:
        found = train_twice(pipe, case.inputs, train, lambda x: pipe(x, gather=True), adds=case.adds)
    return digests(own_inputs(found, rank))


def plain_case(case: Case) -> Outcome:
    """What the plain loop leaves."""
    layers = copy.deepcopy(case.layers)

    def evaluate(inputs: Tree) -> Tree:
        parts = laws.parts_of(inputs, case.micro_batches)
        with one_thread():
            return laws.joined(
                laws.run_layers(layers, part, seed=case.seed, step=2, micro_batch=m) for m, part in enumerate(parts)
            )

    def train(inputs: Tree, step: int) -> Tensor:
        return laws.run_plain(case, layers, inputs, step)

    return train_twice(nn.Sequential(*layers), case.inputs, train, evaluate, adds=case.adds)


# Stories: one script each, for a pipe over processes, a local one, or the plain loop.

WIDTH, SEED, MICRO_BATCHES = 6, 3, 4


class Pipe(Protocol):
    """What a story does with a pipe."""

    def step(self, inputs: Tree, targets: Tree, loss_fn: Callable[..., object], **how: Any) -> Any: ...

    def __call__(self, inputs: Tree, *, gather: bool) -> Any: ...


Make: TypeAlias = Callable[..., Any]
"""Makes a pipe of layers and keyword arguments of `GPipe`."""


class Plain(nn.Sequential):
    """The plain loop as a pipe, as far as it goes."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(*layers)
        self.step_number = 0

    def step(self, inputs: Tree, targets: Tree, loss_fn: Callable[..., Tensor], **how: Any) -> Tensor:
        loss = laws.plain_loop(list(self), inputs, targets, loss_fn, **self._keys(), **how)
        self.step_number += self.training
        return loss

    def forward(self, inputs: Tree, *, gather: bool) -> Any:  # type: ignore[override]  # it is no Sequential to others
        assert not torch.is_grad_enabled()
        keys = self._keys()
        parts = laws.parts_of(inputs, keys.pop("micro_batches"))
        with one_thread():
            made = laws.joined(laws.run_layers(list(self), x, micro_batch=m, **keys) for m, x in enumerate(parts))
        self.step_number += self.training
        return made

    def _keys(self) -> dict[str, Any]:
        return {"micro_batches": MICRO_BATCHES, "seed": SEED, "step": self.step_number}


def data(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, WIDTH, generator=generator), torch.randn(*shape, WIDTH, generator=generator)


@contextmanager
def weights_of(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def network(seed: int = 0) -> list[nn.Module]:
    """Eight layers that draw, for rows of any shape."""
    with weights_of(seed):
        return [
            nn.Linear(WIDTH, 9), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(9),
            nn.Linear(9, 7), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(7, WIDTH),
        ]  # fmt: skip


def normed(momentum: float | None = 0.1) -> list[nn.Module]:
    with weights_of(1):
        return [
            nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Dropout(0.3), nn.Tanh(),
            nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(), nn.Linear(8, WIDTH),
        ]  # fmt: skip


def shapes_change(make: Make) -> Outcome:
    """Rows and lengths that change from step to step; fewer rows than M, and one."""
    pipe, found = make(network()), {}
    optimizer = optimizer_of(pipe)
    for step, (rows, length) in enumerate([(10, 3), (7, 5), (3, 1), (1, 4), (13, 2), (2, 40)]):
        found[f"{step} loss"] = pipe.step(*data(step, rows, length), F.mse_loss)
        note(found, pipe, step)
        optimizer.step()
        optimizer.zero_grad()
    note(found, pipe, "end")
    return found


def one_dimension_more(make: Make) -> Outcome:
    pipe, found = make(network()), {}
    for step, shape in enumerate([(9,), (9, 2), (6, 2, 3), (9,)]):
        found[f"{step} loss"] = pipe.step(*data(step, *shape), F.mse_loss)
        note(found, pipe, step)
    return found


def batch_norm(make: Make) -> Outcome:
    """Statistics of one micro-batch after another, then evaluation by them."""
    pipe, found = make(normed()), {}
    optimizer = optimizer_of(pipe)
    for step, rows in enumerate((13, 9, 11)):
        found[f"{step} loss"] = pipe.step(*data(step, rows), F.mse_loss)
        note(found, pipe, step)
        optimizer.step()
    pipe.eval()
    with torch.no_grad():
        found["evaluation"] = pipe(data(5, 10)[0], gather=True)
        found["validation"] = pipe.step(*data(6, 3), F.mse_loss)
    return found


def deferred_batch_norm(make: Make, momentum: float | None = 0.1) -> Outcome:
    pipe, found = make(normed(momentum), deferred_batch_norm=True), {}
    for step, rows in enumerate((13, 9)):
        found[f"{step} loss"] = pipe.step(*data(step, rows), F.mse_loss)
        note(found, pipe, step)
    loss = F.mse_loss(pipe(data(2, 8)[0], gather=True), data(2, 8)[1])
    loss.backward()
    note(found, pipe, "call")
    pipe.eval()
    with torch.no_grad():
        found["evaluation"] = pipe(data(5, 10)[0], gather=True)
    return found


def cumulative_deferred_batch_norm(make: Make) -> Outcome:
    return deferred_batch_norm(make, None)


class Twice(nn.Module):
    """Pops a value that another layer pops again."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.pop = names
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **popped: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * torch.stack([tensor.tanh() for tensor in popped.values()]).sum(0)
        return out


def skips(make: Make) -> Outcome:
    """Over one stage and over several; several pops of one stash; two at once."""
    with weights_of(2):
        layers: list[nn.Module] = [
            Stash("a", WIDTH), nn.Dropout(0.3), Stash("b", WIDTH), Twice("a"),
            nn.Linear(WIDTH, WIDTH), Twice("a", "b"), Pop({"b": WIDTH}, WIDTH), Twice("a"),
        ]  # fmt: skip
    pipe, found = make(layers), {}
    for step, rows in enumerate((10, 3)):
        found[f"{step} loss"] = pipe.step(*data(step, rows), F.mse_loss)
        note(found, pipe, step)
    return found


WORDS = 11


def squared(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def words(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (rows, 5), generator=generator)
    return x, x.roll(-1, 1)


def train_words(pipe: Any) -> Outcome:
    """Two optimizer steps, one of them behind two mini-batches."""
    found: Outcome = {}
    optimizer = optimizer_of(pipe, torch.optim.Adam)
    for step, rows in enumerate((10, 3, 8)):
        found[f"{step} loss"] = pipe.step(*words(step, rows), squared)
        note(found, pipe, step)
        if step:
            optimizer.step()
            optimizer.zero_grad()
    loss = squared(pipe(words(3, 7)[0], gather=True), words(3, 7)[1])
    loss.backward()
    note(found, pipe, "call")
    return found


def tied_by_identity(make: Make) -> Outcome:
    with weights_of(3):
        layers = [nn.Embedding(WORDS, WIDTH), *network()[:-1], nn.Linear(7, WIDTH), nn.Linear(WIDTH, WORDS)]
    layers[-1].weight = layers[0].weight
    return train_words(make(layers))


def tied_by_name(make: Make) -> Outcome:
    """Layers that each process builds by itself: the copies have the value of the first."""
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Embedding(WORDS, WIDTH),
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.Dropout(0.2),
        lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Tanh,
        lambda: nn.Linear(WIDTH, WORDS),
    ]
    return train_words(make(makers, ties=[("0.weight", "5.weight"), ("1.weight", "3.weight")]))


def tied_modules_by_name(make: Make) -> Outcome:
    """Modules whose weights differ before they are tied."""
    with weights_of(3):
        layers = [nn.Embedding(WORDS, WIDTH), *network()[:-1], nn.Linear(7, WIDTH), nn.Linear(WIDTH, WORDS)]
    return train_words(make(layers, ties=[("0.weight", "9.weight")]))


def autocast(make: Make) -> Outcome:
    pipe, found = make(network()), {}
    with torch.autocast("cpu", torch.bfloat16):
        for step, rows in enumerate((10, 3)):
            found[f"{step} loss"] = pipe.step(*data(step, rows), F.mse_loss)
            note(found, pipe, step)
    return found


def of_valid(target: Tensor) -> Tensor:
    return (target[:, 0] > 0).sum()


def loss_of_valid(output: Tensor, target: Tensor) -> Tensor:
    valid = target[:, :1] > 0
    return ((output - target) ** 2 * valid).sum() / valid.sum()


def reductions(make: Make) -> Outcome:
    """Also a micro-batch of weight 0, whose loss is NaN."""
    pipe, found = make(network()), {}
    ways: list[tuple[Any, float]] = [("mean", 1024.0), ("sum", 0.3), (of_valid, 1.0), (of_valid, 65536.0)]
    for step, (reduction, scale) in enumerate(ways):
        x, y = data(step, 11)
        y[3:6, 0] = -1
        y[-1, 0] = 1
        loss_fn = loss_of_valid if callable(reduction) else F.mse_loss
        found[f"{step} loss"] = pipe.step(x, y, loss_fn, reduction=reduction, scale=scale)
        note(found, pipe, step)
    return found


def with_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, object]]:
    error = (output.detach() - target).abs()
    return F.mse_loss(output, target), {"worst": error.max(), "of rows": (error.sum(1), len(target)), "none": None}


def metrics(make: Make) -> Outcome:
    pipe, found = make(network()), {}
    for step, rows in enumerate((10, 3)):
        found[f"{step} loss"], told = pipe.step(*data(step, rows), with_metrics)
        assert [one["of rows"][1] for one in told] == [len(part) for part in data(step, rows)[0].tensor_split(4)][
            :rows
        ]
        assert all(one["none"] is None for one in told)
        for m, one in enumerate(told):
            found |= {f"{step} worst {m}": one["worst"], f"{step} rows {m}": one["of rows"][0]}
    with torch.no_grad():
        found["validation"], (told, *_) = pipe.step(*data(4, 5), with_metrics)
    return found | {"worst": told["worst"]}


def calls(make: Make) -> Outcome:
    """Two forwards before two backwards, and one whose output is dropped; an input that wants a gradient."""
    found: Outcome = {}
    pipe = make(network())
    (x, y), (x2, y2) = data(0, 10), data(1, 3)
    x2.requires_grad_()
    one, other = pipe(x, gather=True), pipe(x2, gather=True)
    pipe(x, gather=True)
    loss2 = F.mse_loss(other, y2)
    loss2.backward()
    note(found, pipe, "second")
    loss = F.mse_loss(one * 2, y)
    loss.backward()
    note(found, pipe, "first")
    return found | {"loss": loss, "loss 2": loss2, "output": one, "0 input 0": x2.grad}


def without_gradients(make: Make) -> Outcome:
    """In training mode randomness goes on, in evaluation not."""
    pipe, found = make(network()), {}
    with torch.no_grad():
        found["trains"] = pipe(data(0, 10)[0], gather=True)
        found["validates"] = pipe.step(*data(1, 10), F.mse_loss)
    found["loss"] = pipe.step(*data(2, 10), F.mse_loss)
    pipe.eval()
    with torch.no_grad():
        found["evaluates"] = pipe(data(0, 3)[0], gather=True)
    pipe.train()
    found["again"] = pipe.step(*data(2, 10), F.mse_loss)
    note(found, pipe, "end")
    return found


def clipping(make: Make) -> Outcome:
    pipe, found = make(network()), {}
    optimizer = optimizer_of(pipe, torch.optim.Adam)
    for step, (most, kind) in enumerate([(0.1, 2.0), (100.0, 2.0), (0.05, float("inf")), (0.2, 1.0)]):
        found[f"{step} loss"] = pipe.step(*data(step, 10), F.mse_loss)
        found[f"{step} norm"] = pipe.clip_grad_norm_(most, kind)
        note(found, pipe, step)
        optimizer.step()
    return found


def double(make: Make) -> Outcome:
    pipe, found = make([layer.double() for layer in network()]), {}
    x, y = data(0, 10)
    found["loss"] = pipe.step(x.double(), y.double(), F.mse_loss)
    note(found, pipe, "end")
    return found


def built_lazily(make: Make) -> Outcome:
    """Callables: the weights do not depend on who builds them."""
    makers = [
        lambda: nn.Linear(WIDTH, 40), nn.Tanh, lambda: nn.Sequential(nn.Linear(40, 7), nn.Dropout(0.4)),
        lambda: nn.Linear(7, 30), lambda: nn.BatchNorm1d(30), lambda: nn.Linear(30, WIDTH),
    ]  # fmt: skip
    found: Outcome = {}
    pipe = make(makers)
    note(found, pipe, "begin")
    found["loss"] = pipe.step(*data(0, 11), F.mse_loss)
    note(found, pipe, "end")
    return found


def frozen(make: Make) -> Outcome:
    """Nothing to train in front, so that no gradient goes there."""
    layers = network()
    for layer in layers[:4]:
        layer.requires_grad_(False)
    pipe, found = make(layers), {}
    for step, rows in enumerate((10, 3)):
        found[f"{step} loss"] = pipe.step(*data(step, rows), F.mse_loss)
        note(found, pipe, step)
    return found


@dataclass(frozen=True)
class Story:
    """A script, and whether the plain loop can follow it."""

    run: Callable[[Make], Outcome]
    plain: bool


STORIES: Mapping[str, Story] = {
    script.__name__: Story(script, plain)
    for script, plain in [
        (shapes_change, True), (one_dimension_more, True), (batch_norm, True), (deferred_batch_norm, False),
        (cumulative_deferred_batch_norm, False), (skips, True), (tied_by_identity, False), (tied_by_name, False),
        (tied_modules_by_name, False), (autocast, True), (reductions, True), (metrics, False), (calls, False),
        (without_gradients, True), (clipping, False), (double, True), (built_lazily, False), (frozen, True),
    ]
}  # fmt: skip


def tell(rank: int, world: int, name: str) -> Digests:
    """A story, through a pipe over all ranks."""
    remat = [REMATS[(stage + len(name)) % len(REMATS)] for stage in range(world)]
    pipes = []

    def make(layers: Any, **how: Any) -> gpipe.GPipe:
        pipes.append(gpipe.GPipe(layers, world, MICRO_BATCHES, seed=SEED, remat=remat, driver="process", **how))
        return pipes[-1]

    found = STORIES[name].run(make)
    for pipe in pipes:
        pipe.close()
    return digests(own_inputs(found, rank))


def locally(layers: Any, **how: Any) -> gpipe.GPipe:
    """A pipe of one partition in this process."""
    return gpipe.GPipe(layers, 1, MICRO_BATCHES, seed=SEED, remat="never", driver="lockstep", **how)
