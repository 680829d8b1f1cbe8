"""Jobs of four ranks: two replicas of a pipe of two stages, unless a job says otherwise."""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gpipe
from gpipe.distributed import context
from gpipe.distributed import reduce as collectives
from gpipe.schedule.action import SHARDS
from gpipe.stages.dtensor import full_tensor, local_tensor
from tests.support.jobs.training import Json
from tests.support.placements import placed
from tests.support.plain_loop import weights_of
from tests.support.planned import staged
from tests.support.processes.marks import FOLDER
from tests.support.said import said

STEPS = 4


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def seeded(*build: Any) -> list[nn.Module]:
    with weights_of(5):
        return [make() for make in build]


def data(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 6, generator=generator)


def part_of(rank: int, stages: int, rows: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
    x, y = data(step, sum(rows))
    return x.split(list(rows))[rank // stages], y.split(list(rows))[rank // stages]


def tensors_of(found: dict[str, Tensor | None]) -> dict[str, Any]:
    """As JSON, to the last bit."""
    return {name: None if tensor is None else tensor.tolist() for name, tensor in found.items()}


def gradients(pipe: nn.Module) -> dict[str, Any]:
    return tensors_of({name: p.grad for name, p in pipe.named_parameters()})


def parameters(pipe: nn.Module) -> dict[str, Any]:
    """The parameters of a rank, as JSON; those that are spread are whole."""
    return tensors_of({name: full_tensor(p.detach()) for name, p in pipe.named_parameters()})


# Gradients.


class Tied(nn.Module):
    """A layer whose weight another has too, with a parameter that is not used, and one that is only at times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.ones(2))
        self.seldom = nn.Parameter(torch.ones(6))

    def forward(self, value: Tensor) -> Tensor:
        made = self.linear(value).tanh()
        return made * self.seldom if len(value) > 1 else made


def network() -> list[nn.Module]:
    """Weights shared by first and last stage, a frozen layer, parameters that have no gradient everywhere."""
    wide, narrow, first, last = seeded(lambda: nn.Linear(6, 700), lambda: nn.Linear(700, 6), Tied, Tied)
    wide.get_parameter("bias").requires_grad_(False)
    last.get_submodule("linear").weight = first.get_parameter("linear.weight")
    return [first, wide, narrow, last]


def train(
    rank: int,
    world: int,
    stages: int,
    rows: Sequence[int],
    bucket: int = collectives.BUCKET,
    schedule: str = "gpipe",
    placement: str = "",
) -> Json:
    """Steps of two mini-batches each; the second adds to the gradients of the first."""
    vars(collectives)["BUCKET"] = bucket
    with placed(placement, 2) if placement else nullcontext():
        pipe = gpipe.GPipe(network(), stages, 4, schedule=schedule, seed=0, driver="process")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    losses, each = [], list[Tensor]()
    first: dict[str, Any] = {}
    for step in range(STEPS):
        for turn in (0, 1):
            x, y = part_of(rank, stages, rows, 2 * step + turn)
            losses.append(pipe.step(x, y, F.mse_loss, losses=each).tolist())
        first = first or gradients(pipe)
        optimizer.step()
        optimizer.zero_grad()
    own = [loss.item() for loss in each]
    return {"losses": losses, "of the last": own, "gradients": first, "parameters": parameters(pipe)}


class Waits(nn.Module):
    """A layer whose backward waits for what other ranks do meanwhile."""

    def forward(self, value: Tensor) -> Tensor:
        return _Waiting.apply(value)


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value + 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if gradient[0, 0] != 0:  # the last one: see `overlap`
            while len(list(Path(os.environ[FOLDER]).glob("reduced_*"))) < 2:
                time.sleep(0.01)
        return gradient


def overlap(rank: int, world: int) -> Json:
    """The last backward of the first stage waits until the last stages have reduced; returns the loss."""
    real = collectives.add_over_replicas

    def add_and_say_so(*args: Any) -> Any:
        yield from real(*args)
        if rank % 2:
            Path(os.environ[FOLDER], f"reduced_{rank}").touch()

    vars(context)["add_over_replicas"] = add_and_say_so
    try:
        layers = seeded(lambda: nn.Linear(6, 6, bias=False), Waits, lambda: nn.Linear(6, 6))
        pipe = gpipe.GPipe(layers, [2, 1], 3, seed=0, driver="process", remat="never")
        x, y = data(0, 3)
        first = torch.tensor([1.0, 0.0, 0.0])  # only micro-batch 0, whose backward is the last, has a gradient

        def loss_of(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
            return F.mse_loss(output * target[1][:, None], target[0] * target[1][:, None])

        return pipe.step(x, (y, first), loss_of).item()
    finally:
        vars(context)["add_over_replicas"] = real


class Marks(nn.Module):
    """A layer whose backward waits for a file, if it is to, and leaves another."""

    def __init__(self, leaves: str, awaits: str = "") -> None:
        super().__init__()
        self.leaves, self.awaits = leaves, awaits

    def forward(self, value: Tensor) -> Tensor:
        value.register_hook(self._mark)
        return value

    def _mark(self, gradient: Tensor) -> None:
        folder = Path(os.environ[FOLDER])
        while self.awaits and not (folder / self.awaits).exists():
            time.sleep(0.01)
        (folder / self.leaves).touch()


def go_on(rank: int, world: int) -> Json:
    """Two replicas of one rank; the second comes to the last stage's REDUCE when the first is done with the other."""
    layers = seeded(lambda: nn.Linear(6, 6), lambda: nn.Linear(6, 6), lambda: nn.Linear(6, 6))
    marks = [Marks(f"first {rank}"), Marks(f"last {rank}", "" if rank == 0 else "first 0")]
    with placed("loop", 2):
        pipe = gpipe.GPipe([layers[0], marks[0], layers[1], marks[1], layers[2]], [2, 3], 2, driver="process")
    pipe.step(*part_of(rank, 1, [4, 4], 0), F.mse_loss)
    return gradients(pipe)


# BatchNorm.


class Aside(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, value: Tensor) -> Tensor:
        self.norm(value.unflatten(1, (3, 2)))
        return value


def aside(momentum: float | None) -> list[nn.Module]:
    """Layers with a BatchNorm in each of two stages, none of which changes what the other sees."""
    return seeded(
        lambda: nn.Linear(6, 6),
        lambda: Aside(nn.BatchNorm1d(3, momentum=momentum)),
        nn.Tanh,
        lambda: Aside(nn.BatchNorm1d(3)),
        lambda: nn.Linear(6, 6),
    )


def defer(rank: int, world: int, rows: Sequence[int], momentum: float | None) -> Json:
    pipe = gpipe.GPipe(aside(momentum), 2, 4, seed=0, driver="process", batch_norm="deferred")
    for step in (0, 1):
        pipe.step(*part_of(rank, 2, rows, step), F.mse_loss)
    with torch.no_grad():
        pipe(part_of(rank, 2, rows, 2)[0])
    return tensors_of(dict(pipe.named_buffers()))


class FailsAtLast(nn.Module):
    """Raises in the last backward of so many, if any."""

    def __init__(self, backwards: int) -> None:
        super().__init__()
        self.left = backwards

    def forward(self, value: Tensor) -> Tensor:
        value.register_hook(self._count)
        return value

    def _count(self, gradient: Tensor) -> None:
        self.left -= 1
        if not self.left:
            raise ArithmeticError("at last")


def fail_late(rank: int, world: int) -> Json:
    """A step that fails on one rank when the others have nothing left to do; gives the buffers, then and after."""
    first, *rest = aside(0.1)
    layers = [first, FailsAtLast(4 if rank == 2 else 0), *rest]
    pipe = gpipe.GPipe(layers, [4, 2], 4, seed=0, driver="process", remat="never", batch_norm="deferred")
    before = tensors_of(dict(pipe.named_buffers()))
    error = said(lambda: pipe.step(*part_of(rank, 2, [7, 4], 0), F.mse_loss))
    failed = tensors_of(dict(pipe.named_buffers()))
    pipe.step(*part_of(rank, 2, [7, 4], 0), F.mse_loss)
    return {"error": error, "same": failed == before, "after": tensors_of(dict(pipe.named_buffers()))}


def normalized() -> list[nn.Module]:
    """Layers with BatchNorms, one of which is two layers."""
    first, norm, *rest = seeded(
        lambda: nn.Linear(6, 6),
        lambda: nn.SyncBatchNorm(6),  # what torch's own needs is a GPU
        nn.Tanh,
        lambda: nn.Linear(6, 6),
        lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.BatchNorm1d(3, affine=False, momentum=None), nn.Flatten()),
        lambda: nn.Linear(6, 6),
    )
    return [first, norm, norm, *rest]


def synchronize(rank: int, world: int, rows: Sequence[int], remat: str, way: str) -> Json:
    """Steps in which BatchNorm normalizes over replicas; then one that cannot be, and another."""
    pipe = gpipe.GPipe(normalized(), [4, 3], 2, seed=0, driver="process", remat=remat, batch_norm="synchronized")
    for step in (0, 1):
        x, y = part_of(rank, 2, rows, step)
        if way == "step":
            pipe.step(x, y, F.mse_loss)
        else:  # the mean over the rows of all replicas
            (F.mse_loss(pipe(x, gather=True), y) * (len(x) / sum(rows))).backward()
    found = {"gradients": gradients(pipe), "buffers": tensors_of(dict(pipe.named_buffers()))}
    told = said(lambda: pipe.step(*part_of(rank, 2, [rows[0], 1], 2), F.mse_loss))
    pipe.eval()
    with torch.no_grad():
        pipe.step(*part_of(rank, 2, rows, 3), F.mse_loss)
    return {**found, "told": told}


# Training tools.


def scale(rank: int, world: int) -> Json:
    """Steps of a scaled loss, one with a gradient that is infinite on one rank alone; gives scales and weights."""
    layers = seeded(lambda: nn.Linear(6, 6), nn.Tanh, lambda: nn.Linear(6, 6), nn.Tanh)
    pipe = gpipe.GPipe(layers, [3, 1], 2, seed=0, driver="process")  # the last stage has no parameters
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1) if rank % 2 == 0 else None
    scaler = gpipe.GradScaler(pipe, init_scale=64.0, growth_interval=100, stop_after=1)
    found, told = [], ""
    for step, broken in enumerate([False, True, False, True, True]):
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(*part_of(rank, 2, [5, 3], step), F.mse_loss, scaler=scaler)
        if broken and rank == 2:
            gradient = next(pipe.parameters()).grad
            assert gradient is not None
            gradient[0] = float("inf")
        if step:
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(100.0)
        told = said(lambda: scaler.step(optimizer))
        scaler.update()
        pipe.zero_grad()
        found.append([scaler.get_scale(), parameters(pipe)])
    return {"found": found, "told": told}


def clip(rank: int, world: int, stages: int) -> Json:
    """Norms of gradients, and what clipping makes of them; the middle layers are frozen."""
    layers = network()
    for layer in layers[1:3]:
        layer.requires_grad_(False)
    pipe = gpipe.GPipe(layers, stages, 4, seed=0, driver="process")
    empty = float(pipe.clip_grad_norm_(1.0))
    found = []
    for norm_type in (2.0, float("inf"), 1.0):
        pipe.zero_grad()
        pipe.step(*part_of(rank, stages, [7, 3] if world > stages else [10], 0), F.mse_loss)
        before = gradients(pipe)
        found.append([before, float(pipe.clip_grad_norm_(0.01, norm_type)), gradients(pipe)])
    return {"empty": empty, "found": found}


class Root(nn.Module):
    """Finite for what is not negative, and its gradient for what is not zero."""

    def forward(self, value: Tensor) -> Tensor:
        return value.sqrt()


def roots() -> list[nn.Module]:
    """A layer that changes nothing, a root, and one that changes nothing."""
    first = nn.Linear(6, 6)
    with torch.no_grad():
        first.weight.copy_(torch.eye(6))
        first.bias.zero_()
    return [first, nn.Hardtanh(-9, 9), Root(), nn.Identity()]


def break_down(rank: int, world: int) -> Json:
    """A step whose loss is not finite, the same step looked into, and one that is fine again."""
    pipe = gpipe.GPipe(roots(), [2, 2], 2, seed=0, driver="process")
    x, y = torch.ones(4, 6), torch.ones(4, 6)
    if rank // 2 == 1:
        x[3, 2] = -1.0
    loss = pipe.step(x, y, F.mse_loss)
    with gpipe.detect_nonfinite(pipe):
        told = said(lambda: pipe.step(x, y, F.mse_loss))
    with gpipe.detect_nonfinite(pipe):
        after = pipe.step(x.abs(), y, F.mse_loss)
    return {"loss": loss.tolist(), "told": told, "after": after.tolist()}


# What torch has for data parallelism.


def mlp() -> list[nn.Module]:
    return seeded(*[lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(4)])


def zero(rank: int, world: int) -> Json:
    """Adam whose state is spread over the replicas."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of torch.jit

    mesh = mesh_of(dp=2, pp=2)
    pipe = gpipe.GPipe(mlp(), 2, 4, seed=0, mesh=mesh)
    optimizer = ZeroRedundancyOptimizer(
        pipe.parameters(), torch.optim.Adam, process_group=mesh["dp"].get_group(), lr=0.01
    )
    for step in range(STEPS):
        pipe.step(*part_of(rank, 2, [7, 5], step), F.mse_loss)
        optimizer.step()
        pipe.zero_grad()
    return parameters(pipe)


def shard_some(rank: int, world: int, replicas: int, cases: list[tuple[str, int, int, str, list[int]]]) -> Json:
    """What training leaves by case, with no layers sharded and with these, each stage of which is gathered once.

    Steps in pairs, evaluations and a call, after two steps that failed: in a backward, and behind a forward.
    """
    partitions = world // replicas
    mesh, rows, found = mesh_of(dp=replicas, pp=partitions), [7, 9, 6][:replicas], []
    for schedule, each, micro_batches, remat, layers in cases:
        left: list[Any] = []
        for sharded in ([], layers):
            how: dict[str, Any] = {"schedule": staged(schedule, each), "remat": remat}
            pipe = gpipe.GPipe(mlp(), partitions, micro_batches, seed=0, mesh=mesh, **how)
            for name, layer in pipe.named_children():
                if int(name) in sharded:
                    fully_shard(layer, mesh=mesh["dp"])
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
            for fails in (FailsAtLast(min(2, micro_batches)), lambda *_: 1 // 0):
                handle = next(pipe.children()).register_forward_hook(lambda *given, fails=fails: fails(given[-1]))
                assert "Error" in said(partial(pipe.step, *part_of(rank, partitions, rows, 0), F.mse_loss))
                handle.remove()
                pipe.zero_grad()
            for step in range(2):
                for turn in (0, 1):
                    with gpipe.record(pipe) as recording:
                        left.append(float(pipe.step(*part_of(rank, partitions, rows, step + turn), F.mse_loss)))
                left += evaluations(pipe, *part_of(rank, partitions, rows, step))
                left += [whole_gradients(pipe), float(pipe.clip_grad_norm_(0.05)), whole_gradients(pipe)]
                optimizer.step()
                optimizer.zero_grad()
            x, y = part_of(rank, partitions, rows, 2)
            (F.mse_loss(pipe(x, gather=True), y) * (len(x) / sum(rows))).backward()
            left += [whole_gradients(pipe), parameters(pipe)]
            with torch.no_grad():
                pipe(x)
                left.append(next(pipe.children())(x).tolist())  # by torch's own gather
            shards = [message for message in recording.messages() if message.what == "shards"]
            spans, table = recording.timelines[-1].spans, pipe.program.table
            stages = [own.index for own in pipe._stages.local if any(layer.index in sharded for layer in own.layers)]
            right = {(kind, stage) for stage in stages for kind in SHARDS if replicas > 1}
            assert bool(shards) == (bool(sharded) and replicas > 1)
            for actions in ([span.action for span in spans if span.rank == rank], table[rank % partitions]):
                assert sorted(str(a) for a in actions if a.kind in SHARDS) == sorted(
                    f"{s}{k.value}" for k, s in right
                )
            pipe.close()
        found.append([left[: len(left) // 2], left[len(left) // 2 :]])
    return found


def evaluations(pipe: gpipe.GPipe, x: Tensor, y: Tensor) -> list[float]:
    """The losses of a step and of a call that leave gradients as they are."""
    pipe.eval()
    with torch.no_grad():
        losses = [float(pipe.step(x, y, F.mse_loss)), float(F.mse_loss(pipe(x, gather=True), y))]
    pipe.train()
    return losses


def whole_gradients(pipe: nn.Module) -> dict[str, Any]:
    return {name: full_tensor(p.grad).tolist() for name, p in pipe.named_parameters() if p.grad is not None}


class Either(nn.Module):
    """Has one of two layers of one size run, by the sign of what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.positive(x) if x.sum() > 0 else self.negative(x))


def shard_unlike(rank: int, world: int) -> Json:
    """Two replicas that use different layers of a sharded stage in a step, and the same ones in the next.

    Then one with fewer micro-batches than the other, whose layers could not be gathered together.
    """
    mesh = mesh_of(dp=2, pp=1)
    pipe = gpipe.GPipe([Either(), nn.Linear(4, 2)], 1, 2, seed=0, mesh=mesh)
    fully_shard(next(pipe.children()), mesh=mesh["dp"])
    told = said(lambda: pipe.step(torch.full((4, 4), 1.0 - 2.0 * rank), torch.zeros(4, 2), F.mse_loss))
    pipe.zero_grad()
    pipe.step(torch.ones(4, 4), torch.zeros(4, 2), F.mse_loss)
    after = [name for name, p in pipe.named_parameters() if p.grad is not None]
    rows = 2 - rank
    fewer = said(lambda: pipe.step(torch.ones(rows, 4), torch.zeros(rows, 2), F.mse_loss))
    return {"told": told, "after": after, "fewer": fewer}


def split_tensors(rank: int, world: int, sizes: dict[str, int]) -> Json:
    """Layers whose weights are spread over "tp", in a pipe and perhaps over replicas."""
    mesh = mesh_of(**sizes)
    layers = mlp()
    for layer in layers[::2]:
        parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    stages, replicas = sizes["pp"], sizes.get("dp", 1)
    pipe = gpipe.GPipe(layers, stages, 3, mesh=mesh)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    rows = [7, 5] if replicas == 2 else [12]
    replica = mesh.get_local_rank("dp") if replicas == 2 else 0
    norms = []
    for step in range(STEPS):
        pipe.step(*part_of(replica, 1, rows, step), F.mse_loss)
        norms.append(float(pipe.clip_grad_norm_(0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return {"parameters": parameters(pipe), "norms": norms, "seed": pipe.seed}


def scale_shards(rank: int, world: int) -> Json:
    """Steps of a scaled loss, the second with an infinite gradient on one rank alone; whole, sharded, and split."""
    found = {}
    for name, sizes in {"whole": "dp", "sharded": "dp", "alone": "tp", "split": "tp"}.items():
        mesh, layers = mesh_of(**{sizes: 2, "pp": 1}), mlp()
        if name == "split":
            parallelize_module(layers[1], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        pipe = gpipe.GPipe(layers, 1, 2, seed=0, mesh=mesh)
        if name == "sharded":
            for layer in layers[1:3]:
                fully_shard(layer, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scaler = gpipe.GradScaler(pipe, init_scale=64.0, growth_interval=100)
        steps = list[Any]()
        for broken in (False, True, False):
            pipe.step(*data(rank if sizes == "dp" else 0, 4), F.mse_loss, scaler=scaler)
            gradient = pipe[1].get_parameter("0.weight").grad
            assert gradient is not None
            if broken and (rank or name == "alone"):
                local_tensor(gradient)[-1] = float("inf")  # by torch alone this rank alone, or none, would see it
            scaler.step(optimizer)
            scaler.update()
            steps.append([scaler.get_scale(), whole_gradients(pipe) if not broken else None, parameters(pipe)])
            pipe.zero_grad()
        found[name] = steps
    return found


def torchs_own(rank: int, world: int) -> Json:
    """All of these in one process group, since DTensor's caches keep the groups of a mesh that is gone."""
    return {
        "zero": zero(rank, world),
        "split": [split_tensors(rank, world, sizes) for sizes in ({"pp": 2, "tp": 2}, {"dp": 2, "pp": 1, "tp": 2})],
    }


# Replicas that are not alike.


def begin_apart(rank: int, world: int, spoiled: str) -> None:
    layers = nn.Sequential(*seeded(lambda: nn.Linear(6, 6), lambda: nn.BatchNorm1d(6), lambda: nn.Linear(6, 3000)))
    if rank == world - 1:
        with torch.no_grad():
            layers.state_dict()[spoiled].view(-1)[-1:].add_(1)
    gpipe.GPipe(layers, [1, 2], 2, driver="process")


def begin_alike(rank: int, world: int) -> int:
    """Callables, and modules of the same seed, whatever the generators of the ranks are at."""
    torch.manual_seed(rank)
    fixed = seeded(lambda: nn.Linear(6, 6))
    pipe = gpipe.GPipe([*fixed, lambda: nn.Linear(6, 6), lambda: nn.BatchNorm1d(6)], 1, 2, driver="process")
    return len(pipe)


def step_apart(rank: int, world: int, name: str) -> None:
    """Replicas of one stage each, of which the second is given something else."""
    pipe = gpipe.GPipe(seeded(lambda: nn.Linear(6, 6)), 1, 2, driver="process", seed=0)
    scaler = gpipe.GradScaler(pipe, init_scale=64.0)
    given: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "reduction": ({"reduction": "mean"}, {"reduction": "sum"}),
        "function": ({"reduction": "mean"}, {"reduction": len}),
        "loss": ({}, {"loss_fn": nn.MSELoss(reduction="sum")}),
        "scale": ({}, {"scale": 2.0}),
        "scaler": ({}, {"scaler": scaler}),
    }
    x, y = data(0, 4)
    pipe.step(x, y, **{"loss_fn": F.mse_loss, **given[name][rank]})


def step_alike(rank: int, world: int) -> list[float]:
    """Said in other words, but the same; and labels of which one replica has some that do not count."""
    pipe = gpipe.GPipe(seeded(lambda: nn.Linear(6, 6)), 1, 2, driver="process", seed=0)
    off = torch.amp.GradScaler("cpu", enabled=False)
    x, y = data(0, 4)
    first = pipe.step(x, y, F.mse_loss, scaler=off) if rank else pipe.step(x, y, nn.MSELoss(), reduction="mean")
    second = pipe.step(x, torch.tensor([1, 2, -100 if rank else 0, 3]), F.cross_entropy)
    return [first.item(), second.item()]


def scale_by_torchs(rank: int, world: int) -> None:
    pipe = gpipe.GPipe(seeded(lambda: nn.Linear(6, 6), lambda: nn.Linear(6, 6)), 2, 2, driver="process")
    x, y = data(0, 4)
    pipe.step(x, y, F.mse_loss, scaler=(gpipe.GradScaler(pipe), torch.amp.GradScaler("cpu"))[rank])
