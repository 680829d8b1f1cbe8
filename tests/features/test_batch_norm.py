"""BatchNorm: each micro-batch is normalized by itself; running statistics are plain, or deferred.

Deferred, they are as of one plain forward of the whole mini-batch.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import gpipe
from gpipe.features.batch_norm import DeferredStatistics
from tests.support.plain_loop import (
    REMATS,
    all_same_bits,
    assert_same_bits,
    mini_batch,
    plain_outputs,
    same_bits,
    tensors_in,
)

M = 4
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def network(norm: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 6), norm(), nn.Tanh(), norm(), nn.Dropout(0.2), nn.Linear(6, 2)]


def data(rows: int = 14) -> tuple[Tensor, Tensor]:
    return mini_batch(3, 2, rows)


def train(pipe: gpipe.GPipe, way: str = "step", rows: int = 14) -> None:
    x, y = data(rows)
    if way == "step":
        pipe.step(x, y, F.mse_loss)
    else:
        F.mse_loss(pipe(x), y).backward()


def buffers_of(layers: Sequence[nn.Module] | nn.Module) -> dict[str, Tensor]:
    module = layers if isinstance(layers, nn.Module) else nn.Sequential(*layers)
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_close(one: nn.Module, other: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for name in BUFFERS:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=rtol, atol=atol)


# What deferring leaves as it was.


def test_names_modules_hooks_momentum_and_buffers_stay_the_users_own() -> None:
    layers = network(lambda: nn.BatchNorm1d(6, momentum=0.3))
    plain = copy.deepcopy(layers)
    modules = [module for layer in layers for module in layer.modules()]
    tensors = {name: id(buffer) for name, buffer in nn.Sequential(*layers).named_buffers()}
    pipe = gpipe.GPipe(layers, 3, M, seed=0, batch_norm="deferred")
    train(pipe)
    assert [module for layer in layers for module in layer.modules()] == modules
    assert [module for module in pipe.modules() if module is not pipe] == modules
    assert list(pipe.state_dict()) == list(nn.Sequential(*plain).state_dict())
    assert {name: id(buffer) for name, buffer in pipe.named_buffers()} == tensors
    for layer, before in zip(layers, plain, strict=True):
        assert type(layer) is type(before)
        assert set(vars(layer)) == set(vars(before))
        assert not layer._forward_pre_hooks
        assert not layer._forward_pre_hooks_with_kwargs
    assert layers[1].momentum == layers[3].momentum == 0.3


@pytest.mark.parametrize("deferred_batch_norm", [False, True])
def test_evaluation_is_that_of_the_plain_layers(deferred_batch_norm: bool) -> None:
    layers = network(lambda: nn.BatchNorm1d(6))
    pipe = gpipe.GPipe(layers, 3, M, seed=0, batch_norm="deferred" if deferred_batch_norm else "micro")
    train(pipe)
    pipe.eval()
    before = buffers_of(pipe)
    x = data(9)[0]
    with torch.no_grad():
        assert all_same_bits([pipe(x)], tensors_in(plain_outputs(layers, x, micro_batches=M, seed=0)))
    assert all(same_bits(before[name], buffer) for name, buffer in pipe.named_buffers())


# Failures.


class Fails(nn.Module):
    """Fails at one of its forwards, or at its first backward."""

    def __init__(self) -> None:
        super().__init__()
        self.countdown: int | None = None
        self.in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown < 0:
                raise RuntimeError("on purpose")
        x = x * 1
        if self.in_backward and x.requires_grad:
            x.register_hook(self._fail)
        return x

    def _fail(self, gradient: Tensor) -> None:
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("way", ["step", "call"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("phase", ["first forward", "last forward", "recompute", "backward"])
@pytest.mark.parametrize("place", [1, 6])
def test_a_failed_step_commits_nothing_and_the_next_one_does(place: int, phase: str, driver: str, way: str) -> None:
    layers = network(lambda: nn.BatchNorm1d(6))
    fails = Fails()
    layers.insert(place, fails)
    expected = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, [2, 2, 3], M, driver=driver, seed=0, batch_norm="deferred")
    before = buffers_of(pipe)
    fails.in_backward = phase == "backward"
    fails.countdown = {"first forward": 0, "last forward": M - 1, "recompute": M, "backward": None}[phase]
    with pytest.raises(RuntimeError, match="on purpose"):
        train(pipe, way)
    after_forward = way == "call" and phase in ("recompute", "backward")  # the forward itself did not fail
    if not after_forward:
        assert all(same_bits(before[name], buffer) for name, buffer in pipe.named_buffers())
    for layer in layers:
        assert not layer._forward_pre_hooks
    fails.countdown, fails.in_backward = None, False
    pipe.load_state_dict(before, strict=False)
    pipe.zero_grad()
    pipe.step_number = 0
    train(pipe, way)
    other = gpipe.GPipe(expected, 1, M, driver="lockstep", seed=0, batch_norm="deferred")
    train(other, way)
    assert_same_bits(pipe, expected)


def test_a_micro_batch_of_one_value_a_channel_is_refused_with_what_to_do() -> None:
    for deferred_batch_norm in (False, True):
        pipe = gpipe.GPipe(
            network(lambda: nn.BatchNorm1d(6)), 2, 4, batch_norm="deferred" if deferred_batch_norm else "micro"
        )
        before = buffers_of(pipe)
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            train(pipe, rows=4)
        notes = "\n".join(caught.value.__notes__)
        assert "fewer micro-batches" in notes
        assert "larger mini-batch" in notes
        assert "layer 1 (1: BatchNorm1d)" in notes
        assert not deferred_batch_norm or all(same_bits(before[name], b) for name, b in pipe.named_buffers())


class Hears:
    """Notes what a module is given, recomputes included."""

    def __init__(self, module: nn.Module) -> None:
        self.given: list[Tensor] = []
        module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: Tensor = args[0] if args else kwargs["input"]
        self.given.append(given.detach().clone())


# Deferred: as one plain forward of the whole mini-batch.

KINDS: dict[str, tuple[Callable[..., _BatchNorm], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d of sequences": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (3, 2)),
    "3d": (nn.BatchNorm3d, (2, 1, 3)),
    "synchronized": (nn.SyncBatchNorm, ()),
}


class Uses(nn.Module):
    """Uses a BatchNorm, by default on the mini-batch itself, and has something to train."""

    def __init__(self, norm: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] = lambda norm, x: norm(x)) -> None:
        super().__init__()
        self.norm, self.run = norm, run
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.norm, x) * self.scale


def deferred(norm: nn.Module, x: Tensor, *, micro_batches: int = M, remat: str = "always", steps: int = 1) -> None:
    """Trains steps on a BatchNorm alone, with deferred statistics."""
    pipe = gpipe.GPipe([Uses(norm)], 1, micro_batches, remat=remat, batch_norm="deferred")
    for _ in range(steps):
        pipe.step(x, x, F.mse_loss)


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [13, 3])
def test_deferred_statistics_are_those_of_a_plain_forward_of_the_mini_batch(
    rows: int, kind: str, momentum: float | None, remat: str
) -> None:
    make, shape = KINDS[kind]
    norm = make(4, momentum=momentum)
    plain = copy.deepcopy(norm)
    micro_batches = M if rows > M else 1
    for seed in (1, 2, 3):  # different mini-batches
        x = torch.randn(rows, 4, *shape, generator=torch.Generator().manual_seed(seed)) * 3 + seed
        deferred(norm, x, micro_batches=micro_batches, remat=remat)
        plain(x)
    assert_close(norm, plain)
    assert norm.num_batches_tracked == 3


@pytest.mark.parametrize("mean", [1e4, -3e4])
def test_deferred_statistics_survive_a_large_mean(mean: float) -> None:
    x = torch.randn(53, 4, generator=torch.Generator().manual_seed(1)) + mean
    norm, plain = nn.BatchNorm1d(4, momentum=1.0), nn.BatchNorm1d(4, momentum=1.0)
    deferred(norm, x)
    plain(x)
    assert_close(norm, plain, rtol=1e-3)
    torch.testing.assert_close(norm.running_var, x.double().var(0).float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("remat", REMATS)
def test_a_deep_batch_norm_has_the_statistics_of_all_that_it_was_given_in_the_forwards(remat: str) -> None:
    layers = network(lambda: nn.BatchNorm1d(6))
    start = copy.deepcopy(layers[3])
    hears = Hears(layers[3])
    train(gpipe.GPipe(layers, 3, M, remat=remat, seed=0, batch_norm="deferred"))
    start(torch.cat(hears.given[:M]))
    assert_close(layers[3], start)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("remat", REMATS)
def test_each_of_several_forwards_of_one_batch_norm_changes_its_statistics_once(
    remat: str, momentum: float | None
) -> None:
    norm = nn.BatchNorm1d(3, momentum=momentum)
    plain = copy.deepcopy(norm)
    hears = Hears(norm)
    pipe = gpipe.GPipe(
        [Uses(norm, lambda norm, x: norm(input=norm(x) + x))], 1, M, remat=remat, batch_norm="deferred"
    )
    pipe.step(data()[0], data()[0], F.mse_loss)
    first, second = hears.given[: 2 * M : 2], hears.given[1 : 2 * M : 2]
    plain(torch.cat(first))
    plain(torch.cat(second))
    assert_close(norm, plain)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("remat", REMATS)
def test_a_batch_norm_that_is_two_layers_of_one_partition(remat: str, affine: bool) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3, affine=affine)
    plain = copy.deepcopy(norm)
    hears = Hears(norm)
    layers = [norm, nn.Linear(3, 3), norm, nn.Linear(3, 3)]
    pipe = gpipe.GPipe(layers, [3, 1], M, remat=remat, batch_norm="deferred")
    pipe.step(data()[0], data()[0], F.mse_loss)
    plain(torch.cat(hears.given[: 2 * M : 2]))
    plain(torch.cat(hears.given[1 : 2 * M : 2]))
    assert_close(norm, plain)


def test_micro_batches_that_leave_a_batch_norm_out_have_no_say_in_its_statistics() -> None:
    norm = nn.BatchNorm1d(3)
    plain = copy.deepcopy(norm)
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0]).repeat_interleave(3)
    gpipe.GPipe([Uses(norm, lambda norm, x: norm(x) if x[0, 0] > 0 else x)], 1, M, batch_norm="deferred").step(
        x, x, F.mse_loss
    )
    plain(torch.cat([x[:3], x[6:9]]))
    assert_close(norm, plain)


def test_a_batch_norm_in_evaluation_amid_training_keeps_its_statistics() -> None:
    layers = network(lambda: nn.BatchNorm1d(6))
    pipe = gpipe.GPipe(layers, 2, M, seed=0, batch_norm="deferred")
    layers[1].eval()
    before = buffers_of(layers[1])
    train(pipe)
    assert all(same_bits(before[name], buffer) for name, buffer in layers[1].named_buffers())
    assert layers[3].num_batches_tracked == 1


@pytest.mark.parametrize("way", ["step", "call"])
def test_a_training_mode_forward_without_grad_commits_too(way: str) -> None:
    norm = nn.BatchNorm1d(3)
    plain = copy.deepcopy(norm)
    pipe = gpipe.GPipe([Uses(norm)], 1, M, batch_norm="deferred")
    x = data()[0]
    with torch.no_grad():
        if way == "step":
            pipe.step(x, x, F.mse_loss)
        else:
            pipe(x)
    plain(x)
    assert_close(norm, plain)


def test_two_forwards_before_their_backwards_are_two_mini_batches() -> None:
    norm = nn.BatchNorm1d(3)
    plain = copy.deepcopy(norm)
    pipe = gpipe.GPipe([Uses(norm)], 1, M, batch_norm="deferred")
    x = data()[0]
    first, second = pipe(x), pipe(x + 1)
    first.sum().backward()
    second.sum().backward()
    plain(x)
    plain(x + 1)
    assert_close(norm, plain)


# Over replicas: see also tests/distributed/test_data_parallel.py.


def test_statistics_of_replicas_are_merged_to_those_of_one_plain_forward_everywhere() -> None:
    x = torch.randn(23, 4, generator=torch.Generator().manual_seed(1)) + 1e4
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
    replicas = [DeferredStatistics.of(norms) for _ in range(3)]
    for replica, parts in zip(replicas, (x[:11].split([5, 4, 2]), [x[11:14]], x[14:].split([5, 4])), strict=True):
        for m, part in enumerate(parts):
            with replica.collect(m):
                for norm in norms[: len(parts)]:  # the second replica leaves the other norm out
                    norm(part)
    told = [replica.to_tree() for replica in replicas]
    for replica in replicas:
        replica.norms = copy.deepcopy(norms)
        replica.merge_replicas(told)
        replica.commit()
    for at, rows in enumerate((x, torch.cat([x[:11], x[14:]]))):
        first, *others = (replica.norms[at] for replica in replicas)
        assert all(same_bits(getattr(first, name), getattr(other, name)) for other in others for name in BUFFERS)
        plain = nn.BatchNorm1d(4)
        plain(rows)
        assert_close(first, plain, rtol=1e-4)  # the plain one is not exact either
