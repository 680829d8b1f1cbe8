"""Rematerialization: how often layers run, and what is alive meanwhile (bits: `tests.support.kinds.state`)."""

import copy
import weakref
from collections.abc import Sequence
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import gpipe
from tests.support.plain_loop import REMATS, train

M = 4
FORWARDS = {"never": M, "except_last": 2 * M - 1, "always": 2 * M, "offload": M, "offload_inputs": 2 * M}


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
    words = r"layer 1 \(1: MomentumEncoder\) .* 1.momentum.weight, 1.momentum.bias.* \[weights-written-in-forward\]"
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
