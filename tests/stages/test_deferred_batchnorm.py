"""Deferred BatchNorm: running statistics as of one plain forward of the whole mini-batch."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import gpipe
from gpipe.stages.batchnorm import DeferredStatistics
from tests.support.normalized import BUFFERS, M, assert_close, buffers_of, data, network, train
from tests.support.plain_loop import (
    REMATS,
    same_bits,
)


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
    pipe = gpipe.GPipe([Uses(norm)], 1, micro_batches, deferred_batch_norm=True, remat=remat)
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


@pytest.mark.parametrize("way", ["step", "call"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_deferred_statistics_have_the_same_bits_for_every_cut_and_remat(driver: str, way: str) -> None:
    outcomes = []
    for partitions, remat in [(1, "never"), (1, "always"), (2, "always"), (3, "except_last"), (6, "always")]:
        layers = network(lambda: nn.BatchNorm1d(6))
        pipe = gpipe.GPipe(layers, partitions, M, remat=remat, driver=driver, deferred_batch_norm=True, seed=0)
        train(pipe, way, 14)
        train(pipe, way, 9)
        outcomes.append({**buffers_of(pipe), **{name: p.grad for name, p in pipe.named_parameters()}})
    for other in outcomes[1:]:
        assert all(same_bits(outcomes[0][name], other[name]) for name in outcomes[0])


@pytest.mark.parametrize("remat", REMATS)
def test_a_deep_batch_norm_has_the_statistics_of_all_that_it_was_given_in_the_forwards(remat: str) -> None:
    layers = network(lambda: nn.BatchNorm1d(6))
    start = copy.deepcopy(layers[3])
    hears = Hears(layers[3])
    train(gpipe.GPipe(layers, 3, M, remat=remat, deferred_batch_norm=True, seed=0))
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
        [Uses(norm, lambda norm, x: norm(input=norm(x) + x))], 1, M, deferred_batch_norm=True, remat=remat
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
    pipe = gpipe.GPipe(layers, [3, 1], M, deferred_batch_norm=True, remat=remat)
    pipe.step(data()[0], data()[0], F.mse_loss)
    plain(torch.cat(hears.given[: 2 * M : 2]))
    plain(torch.cat(hears.given[1 : 2 * M : 2]))
    assert_close(norm, plain)


def test_micro_batches_that_leave_a_batch_norm_out_have_no_say_in_its_statistics() -> None:
    norm = nn.BatchNorm1d(3)
    plain = copy.deepcopy(norm)
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0]).repeat_interleave(3)
    gpipe.GPipe([Uses(norm, lambda norm, x: norm(x) if x[0, 0] > 0 else x)], 1, M, deferred_batch_norm=True).step(
        x, x, F.mse_loss
    )
    plain(torch.cat([x[:3], x[6:9]]))
    assert_close(norm, plain)


def test_a_batch_norm_in_evaluation_amid_training_keeps_its_statistics() -> None:
    layers = network(lambda: nn.BatchNorm1d(6))
    pipe = gpipe.GPipe(layers, 2, M, deferred_batch_norm=True, seed=0)
    layers[1].eval()
    before = buffers_of(layers[1])
    train(pipe)
    assert all(same_bits(before[name], buffer) for name, buffer in layers[1].named_buffers())
    assert layers[3].num_batches_tracked == 1


@pytest.mark.parametrize("way", ["step", "call"])
def test_a_training_mode_forward_without_grad_commits_too(way: str) -> None:
    norm = nn.BatchNorm1d(3)
    plain = copy.deepcopy(norm)
    pipe = gpipe.GPipe([Uses(norm)], 1, M, deferred_batch_norm=True)
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
    pipe = gpipe.GPipe([Uses(norm)], 1, M, deferred_batch_norm=True)
    x = data()[0]
    first, second = pipe(x), pipe(x + 1)
    first.sum().backward()
    second.sum().backward()
    plain(x)
    plain(x + 1)
    assert_close(norm, plain)


# Over replicas: see also tests/distributed/test_data_parallel.py.


def told_by(norms: Sequence[_BatchNorm], parts: Sequence[Sequence[Tensor]]) -> list[DeferredStatistics]:
    """What each replica collects; `parts` are its micro-batches."""
    replicas = [DeferredStatistics.of(norms) for _ in parts]
    for deferred, micro_batches in zip(replicas, parts, strict=True):
        for m, x in enumerate(micro_batches):
            with deferred.collect(m):
                for norm in norms[: len(micro_batches)]:
                    norm(x)
    return replicas


def test_statistics_of_replicas_are_merged_to_those_of_one_plain_forward_everywhere() -> None:
    x = torch.randn(23, 4, generator=torch.Generator().manual_seed(1)) + 1e4
    norm = nn.BatchNorm1d(4)
    parts = [x[:11].split([5, 4, 2]), x[11:14].split([3]), x[14:].split([5, 4])]
    replicas = told_by([norm], parts)
    told = [replica.to_tree() for replica in replicas]
    buffers = []
    for replica in replicas:
        own = copy.deepcopy(norm)
        replica.merge_replicas(told)
        replica.norms = [own]
        replica.commit()
        buffers.append(own)
    plain = copy.deepcopy(norm)
    plain(x)
    for own in buffers:
        assert all(same_bits(getattr(own, name), getattr(buffers[0], name)) for name in BUFFERS)
        assert_close(own, plain, rtol=1e-4)  # the plain one is not exact either


def test_a_replica_that_left_a_batch_norm_out_has_no_say_in_its_statistics() -> None:
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
    one, other = told_by(norms, [x[:5].split([3, 2]), x[5:].split([4])])  # the second only has the first norm
    one.merge_replicas([one.to_tree(), other.to_tree()])
    one.commit()
    for norm, rows in zip(norms, (x, x[:5]), strict=True):
        plain = nn.BatchNorm1d(4)
        plain(rows)
        assert_close(norm, plain)
