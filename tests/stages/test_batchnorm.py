"""BatchNorm: each micro-batch is normalized by itself; running statistics are plain, or of the whole mini-batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.normalized import M, buffers_of, data, network, train
from tests.support.plain_loop import (
    REMATS,
    assert_same_bits,
    one_thread,
    plain_call,
    plain_loop,
    run_layers,
    same_bits,
)

# By default: as the plain layers.


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("way", ["step", "call"])
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("partitions", [1, 3, 6])
def test_by_default_running_statistics_are_those_of_one_micro_batch_after_another(
    partitions: int, remat: str, way: str, momentum: float | None
) -> None:
    layers = network(lambda: nn.BatchNorm1d(6, momentum=momentum))
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, partitions, M, remat=remat, seed=0)
    for step in (0, 1):
        train(pipe, way)
        (plain_loop if way == "step" else plain_call)(plain, *data(), F.mse_loss, micro_batches=M, seed=0, step=step)
        assert_same_bits(pipe, plain)
    assert layers[1].num_batches_tracked == 2 * M


# What deferring leaves as it was.


def test_names_modules_hooks_momentum_and_buffers_stay_the_users_own() -> None:
    layers = network(lambda: nn.BatchNorm1d(6, momentum=0.3))
    plain = copy.deepcopy(layers)
    modules = [module for layer in layers for module in layer.modules()]
    tensors = {name: id(buffer) for name, buffer in nn.Sequential(*layers).named_buffers()}
    pipe = gpipe.GPipe(layers, 3, M, deferred_batch_norm=True, seed=0)
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
    pipe = gpipe.GPipe(layers, 3, M, deferred_batch_norm=deferred_batch_norm, seed=0)
    train(pipe)
    pipe.eval()
    before = buffers_of(pipe)
    x = data(9)[0]
    with torch.no_grad(), one_thread():
        output = pipe(x)
        parts = [run_layers(layers, part, seed=0, step=1, micro_batch=m) for m, part in enumerate(x.tensor_split(M))]
        assert same_bits(output, torch.cat([part for part in parts if isinstance(part, Tensor)]))
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
    pipe = gpipe.GPipe(layers, [2, 2, 3], M, driver=driver, deferred_batch_norm=True, seed=0)
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
    other = gpipe.GPipe(expected, 1, M, driver="lockstep", deferred_batch_norm=True, seed=0)
    train(other, way)
    assert_same_bits(pipe, expected)


def test_a_micro_batch_of_one_value_a_channel_is_refused_with_what_to_do() -> None:
    for deferred_batch_norm in (False, True):
        pipe = gpipe.GPipe(network(lambda: nn.BatchNorm1d(6)), 2, 4, deferred_batch_norm=deferred_batch_norm)
        before = buffers_of(pipe)
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            train(pipe, rows=4)
        notes = "\n".join(caught.value.__notes__)
        assert "fewer micro-batches" in notes
        assert "larger mini-batch" in notes
        assert "layer 1 (1: BatchNorm1d)" in notes
        assert not deferred_batch_norm or all(same_bits(before[name], b) for name, b in pipe.named_buffers())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm1d(6, affine=False))], ids=str)
def test_a_batch_norm_of_two_partitions_is_refused_with_the_reason(norm: nn.Module) -> None:
    layers = [nn.Linear(6, 6), norm, nn.Linear(6, 6), norm]
    with pytest.raises(ValueError, match=r"layer 3 .* stage 0 .* running\s+statistics .* one\s+stage"):
        gpipe.GPipe(layers, 2, M)
    gpipe.GPipe(layers, 1, M)
    gpipe.GPipe(layers, [1, 3], M)
