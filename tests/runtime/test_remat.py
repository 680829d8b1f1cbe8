"""Rematerialization: how often layers run, what is alive meanwhile, and that a recompute is the forward again."""

import copy
import weakref
from collections.abc import Callable, Sequence
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import gpipe
from tests.support.odd_layers import Drift
from tests.support.plain_loop import REMATS, assert_same_bits, same_bits, train, train_plainly

M = 4
FORWARDS = {"never": M, "except_last": 2 * M - 1, "always": 2 * M, "offload": M}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        out: Tensor = self.linear(x)
        return out


def step(pipe: gpipe.GPipe, way: str) -> None:
    train(pipe, torch.ones(9, 3), torch.ones(9, 3), F.mse_loss, way)


@pytest.mark.parametrize("way", ["step", "call"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize(
    ("partitions", "remat"),
    [(k, (remat,) * k) for k in (1, 2, 3) for remat in REMATS]
    + [(2, ("never", "always")), (3, REMATS[:3]), (3, ("except_last", "never", "always")), (3, REMATS[:0:-1])],
)
def test_how_often_a_layer_runs_in_a_step(partitions: int, remat: Sequence[str], driver: str, way: str) -> None:
    layers = [Counting() for _ in range(6)]
    with gpipe.GPipe(layers, [6 // partitions] * partitions, M, remat=remat, driver=driver) as pipe:
        step(pipe, way)
    stage_of = [index * partitions // 6 for index in range(6)]
    assert [layer.forwards for layer in layers] == [FORWARDS[remat[stage]] for stage in stage_of]


def test_nothing_runs_twice_without_grad() -> None:
    layers = [Counting() for _ in range(3)]
    pipe = gpipe.GPipe(layers, 3, M, remat="always")
    with torch.no_grad():
        pipe(torch.ones(9, 3))
        pipe.step(torch.ones(9, 3), torch.ones(9, 3), F.mse_loss)
    assert [layer.forwards for layer in layers] == [2 * M] * 3


@pytest.mark.parametrize("remat", REMATS)
def test_the_loss_is_computed_once_a_micro_batch(remat: str) -> None:
    seen: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(int(target[0]))
        return F.mse_loss(output, torch.ones_like(output))

    with gpipe.GPipe([Counting(), Counting()], 2, M, remat=remat, driver="lockstep") as pipe:
        pipe.step(torch.ones(M, 3), torch.arange(M), loss_fn)
    assert sorted(seen) == list(range(M))


@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize(("way", "forwards"), [("step", 1), ("call", 2)])
def test_nothing_is_recomputed_where_the_backward_follows_at_once(way: str, forwards: int, partitions: int) -> None:
    """A call comes back to the caller in between, and holds boundaries only."""
    layers = [Counting() for _ in range(3)]
    pipe = gpipe.GPipe(layers, partitions, 1, remat="always")
    step(pipe, way)
    assert [layer.forwards for layer in layers] == [forwards] * 3


class Watched(nn.Module):
    """Notes at each forward how many tensors, made inside by earlier ones, are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.inside: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(self.now_alive())
        inner: Tensor = self.linear(x)
        self.inside.append(weakref.ref(inner))
        return inner.sin()  # whose backward needs `inner`

    def now_alive(self) -> int:
        return sum(ref() is not None for ref in self.inside)


@pytest.mark.parametrize("way", ["step", "call"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_no_more_than_one_micro_batch_is_alive_inside(partitions: int, driver: str, way: str) -> None:
    layers = [Watched() for _ in range(6)]
    with gpipe.GPipe(layers, [6 // partitions] * partitions, M, remat="always", driver=driver) as pipe:
        step(pipe, way)
    assert [layer.alive for layer in layers] == [[0] * 2 * M] * 6
    assert [layer.now_alive() for layer in layers] == [0] * 6


@pytest.mark.parametrize("way", ["step", "call"])
def test_what_is_kept_is_alive(way: str) -> None:
    """The measure itself: without recomputation the inside of all micro-batches waits for the backward."""
    never, last = Watched(), Watched()
    with gpipe.GPipe([never, last], 2, M, remat=("never", "except_last")) as pipe:
        step(pipe, way)
    assert never.alive == [0, 1, 2, 3]
    assert last.alive == [0, 1, 1, 1, 0, 0, 0]
    assert never.now_alive() == last.now_alive() == 0


def test_a_kept_micro_batch_is_gone_before_the_next_is_recomputed() -> None:
    layer = Watched()
    pipe = gpipe.GPipe([layer], 1, M, remat="except_last")
    output = pipe(torch.ones(9, 3))
    assert layer.now_alive() == 1
    output.sum().backward()
    assert layer.alive == [0, *[1] * (M - 1), *[0] * (M - 1)]


class AssignsBuffer(nn.Module):
    """Has a new buffer after each forward, which the next one uses."""

    seen: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        before = x.new_ones(x.shape[1]) if self.seen is None else self.seen
        self.seen = 0.5 * before + x.detach().mean(0)
        return x * before


class ReadsItsBatchNorm(nn.Module):
    """Uses the running statistics of its own BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        assert self.norm.running_mean is not None
        return out + self.norm.running_mean.clone()


class WritesPastTheVersion(nn.Module):
    """Counts by `.data`, which raises no version, and in the first micro-batch of all there is nothing to count."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.count.data.add_((x.detach() > 1).sum())
        return x * (1 + self.count)


class MakesItsBuffer(nn.Module):
    """Has no buffer before its first forward."""

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "mean"):
            self.mean.lerp_(x.detach().mean(0), 0.5)
        else:
            self.register_buffer("mean", x.detach().mean(0))
        return x - self.mean


class Delays(nn.Module):
    """Has a buffer behind every other forward, which the next takes."""

    held: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", None)

    def forward(self, x: Tensor) -> Tensor:
        before, self.held = self.held, x.detach().mean(0) if self.held is None else None
        return x if before is None else x + before


class KeepsASign(nn.Module):
    """Writes what it may have already, the sign of a zero too, which torch calls equal to another."""

    sign: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sign", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        before = self.sign.clone()
        self.sign.copy_(0.0 * x.detach().mean())
        return x * torch.ones(()).copysign(before)


class MakesItsNorm(nn.Module):
    """Has no module inside before its first forward."""

    norm: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(6, affine=False)
        out: Tensor = self.norm(x)
        return out


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: nn.BatchNorm1d(6),
    "batch_norm_cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
    "batch_norm_without_statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "instance_norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "spectral_norm": lambda: spectral_norm(nn.Linear(6, 6), n_power_iterations=2),
    "spectral_norm_of_a_batch_norm": lambda: nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)),
    "weight_norm": lambda: weight_norm(nn.Linear(6, 6)),
    "drift_in_place": lambda: Drift(6, in_place=True),
    "drift_by_assignment": lambda: Drift(6, in_place=False),
    "assigned_from_none": AssignsBuffer,
    "reads_its_batch_norm": ReadsItsBatchNorm,
    "past_the_version": WritesPastTheVersion,
    "made_in_the_forward": MakesItsBuffer,
    "gone_again": Delays,
    "as_it_was": KeepsASign,
    "module_made_in_the_forward": MakesItsNorm,
}


@pytest.mark.parametrize("way", ["step", "call"])
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("cut", [[5], [2, 3]], ids=str)
@pytest.mark.parametrize("name", STATEFUL)
def test_a_recompute_sees_the_state_that_the_forward_saw(name: str, cut: list[int], remat: str, way: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), STATEFUL[name](), nn.Dropout(0.2), STATEFUL[name](), nn.Linear(6, 2)]
    reference = copy.deepcopy(layers)
    x, y = torch.randn(14, 5), torch.randn(14, 2)
    with gpipe.GPipe(layers, cut, M, remat=remat, seed=1) as pipe:
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (pipe, nn.Sequential(*reference))]
        for number in range(3):
            train(pipe, x, y, F.mse_loss, way)
            train_plainly(reference, x, y, F.mse_loss, way, micro_batches=M, seed=1, step=number)
            assert_same_bits(pipe, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("name", STATEFUL)
def test_forwards_that_come_before_the_backward_of_another_do_not_disturb_it(name: str) -> None:
    """Two calls, then their backwards: each recompute sees the state of its own forward."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), STATEFUL[name](), nn.Linear(6, 2)]
    x, y = torch.randn(14, 5), torch.randn(14, 2)
    found = list[list[Tensor | None]]()
    for remat in ("never", "always"):
        pipe = gpipe.GPipe(copy.deepcopy(layers), 2, M, remat=remat, seed=1)
        first, second = pipe(x), pipe(x + 1)
        F.mse_loss(second, y).backward()
        with torch.no_grad():
            pipe(x - 1)
        F.mse_loss(first, y).backward()
        found.append([*(p.grad for p in pipe.parameters()), *pipe.buffers()])
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


class Unsteady(nn.Module):
    """Draws where no key reaches it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * next(NUMBERS)


NUMBERS = count(1)


class MomentumEncoder(nn.Module):
    """Updates a frozen copy of its weights in the forward, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.momentum = copy.deepcopy(self.encoder).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for kept, new in zip(self.momentum.parameters(), self.encoder.parameters(), strict=True):
                kept.mul_(0.9).add_(new + 1, alpha=0.1)
            keys = self.momentum(x)
        queries: Tensor = self.encoder(x)
        return queries + keys


def test_a_momentum_encoder_trains_without_recomputation_and_is_named_with_it() -> None:
    layers, x = [nn.Linear(4, 4), MomentumEncoder(), nn.Linear(4, 4)], torch.rand(8, 4)
    with gpipe.GPipe(copy.deepcopy(layers), [1, 2], 4, remat="never") as pipe:
        for _ in range(3):
            pipe.step(x, x, F.mse_loss)
    words = (
        r"layer 1 \(1: MomentumEncoder\) .* writes the weights 1.momentum.weight, 1.momentum.bias, .* remat='never'"
    )
    with gpipe.GPipe(layers, [1, 2], 4, remat="always") as pipe, pytest.raises(RuntimeError, match=words):
        pipe.step(x, x, F.mse_loss)


@pytest.mark.parametrize("casts", [False, True])
def test_a_layer_that_gives_something_else_is_named_behind_one_with_buffers(casts: bool) -> None:
    """Bug stories: a layer whose buffers went on from try to try was blamed; tries without the autocast failed."""
    layers = [nn.Linear(4, 4), spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), Unsteady(), nn.Linear(4, 4)]
    pipe = gpipe.GPipe(layers, [1, 4], 2, remat="always")
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=casts),
        pytest.raises(RuntimeError, match=r"recomputation of layer 3 \(3: Unsteady\) gave different values"),
    ):
        pipe.step(torch.rand(8, 4), torch.rand(8, 4), F.mse_loss)
