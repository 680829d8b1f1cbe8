"""Losses that keep state, pop what a layer stashed, or work in place, are as in the plain loop, or refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import accumulated, assert_same_bits, one_thread, plain_loop, same_bits
from tests.support.two_steps import CUTS, DRIVERS, REMAT, M, X, Y, check, network


class CentredLoss(nn.Module):
    """Keeps a moving centre of what it sees."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - self.centre - target).pow(2).mean()
        self.centre.lerp_(output.detach().mean(0), 0.5)
        return loss


@CUTS
@DRIVERS
@REMAT
def test_a_loss_that_keeps_state_sees_the_micro_batches_in_order(remat: str, driver: str, cut: list[int]) -> None:
    ours, plain = CentredLoss(), CentredLoss()
    check(network(torch.tanh, torch.sin), cut, driver, remat, ours, plain)
    assert torch.equal(ours.centre, plain.centre)


class Gate(nn.Module):
    """Gives a balancing loss beside its output."""

    stash = ("balance",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        share = self.linear(x).softmax(-1)
        return x * share, {"balance": (share.mean(0) ** 2).sum()}


class Balanced:
    """A loss that pops it."""

    pop = ("balance",)

    def __call__(self, output: Tensor, target: Tensor, balance: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.1 * balance


@CUTS
@DRIVERS
@REMAT
def test_a_loss_pops_what_a_layer_stashed(remat: str, driver: str, cut: list[int]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Gate(), nn.Tanh(), nn.Linear(4, 4)]
    reference = copy.deepcopy(layers)
    with gpipe.GPipe(layers, cut, M, driver=driver, remat=remat, seed=5) as pipe:
        loss = pipe.step(X, Y, Balanced())
        with torch.no_grad():
            checked = pipe.step(X, Y, Balanced())

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        value, held = reference[1](reference[0](x))
        made: Tensor = Balanced()(reference[3](reference[2](value)), y, **held)
        return made

    parts = [*zip(X.tensor_split(M), Y.tensor_split(M), strict=True)]
    with one_thread():
        total = accumulated((loss_of(x, y) for x, y in parts), [len(x) / len(X) for x, _ in parts])
    assert same_bits(loss, total)
    assert same_bits(checked, total)
    assert_same_bits(pipe, reference)


def test_a_stash_that_nobody_pops_is_refused_at_the_first_step_and_dropped_by_a_call() -> None:
    pipe = gpipe.GPipe([nn.Linear(4, 4), Gate(), nn.Linear(4, 4)], 3, M)
    with pytest.raises(
        ValueError, match=r"layer 1 \(Gate\) stashes 'balance', which neither a later layer nor loss_fn"
    ):
        pipe.step(X, Y, F.mse_loss)
    assert pipe(X).shape == X.shape
    assert gpipe.Sequential(nn.Linear(4, 4), Gate())(X).shape == X.shape


def test_a_loss_that_pops_what_nobody_stashes_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_fn pops 'balance', which no layer stashes"):
        gpipe.GPipe(network(), 2, M).step(X, Y, Balanced())


@CUTS
@DRIVERS
@REMAT
def test_the_loss_may_work_in_place_on_its_output_and_its_target(remat: str, driver: str, cut: list[int]) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        target[target > 1] = 0.0
        return F.mse_loss(output.clamp_(-0.5, 0.5), target)

    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity(), nn.Identity()]
    reference = copy.deepcopy(layers)
    y, z = Y.clone(), Y.clone()
    with gpipe.GPipe(layers, cut, M, driver=driver, remat=remat, seed=5) as pipe:
        loss = pipe.step(X, y, loss_fn)
    assert same_bits(loss, plain_loop(reference, X, z, loss_fn, micro_batches=M, seed=5))
    assert_same_bits(pipe, reference)
